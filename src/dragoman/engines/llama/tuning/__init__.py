"""Measurements that choose the weight layout and the number of threads for a model on this machine."""
