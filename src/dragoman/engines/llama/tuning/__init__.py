"""`dragoman tune`: measures layouts of the weights and numbers of threads, and records the fastest.

record      what was chosen for a model file; read when the model is loaded
tuner       tries the candidates and chooses
trial       the process that measures one candidate
requantize  writes a copy with Q8_0 weights
"""
