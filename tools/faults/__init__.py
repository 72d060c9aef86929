"""Fault injection: a scenario breaks something under load, a judge says whether the server took it well."""
