"""Keeping a model to a shape while it writes: JSON that fits a schema, calls that fit their tools.

grammar       from a request to the grammar of its whole reply, with what could not be kept to
calls         how a call is written, for every kind of call syntax
values        arguments that are not written as one JSON text
excerpts      schemas of a document, with no more than they refer to
thoughts      what thoughts begin and end with
lark          pieces of grammar text
schema        what of a JSON Schema can be enforced
patterns      regular expressions of schemas
numbers       bounds of numbers
finite        schemas that no finite text can satisfy
walk          where schemas stand inside schemas
constraints   from a request to a compiled grammar: the cache, the turns of callers, the trial
caller_turns  limits on work at the same time, in total and for each caller
trial_client  the engine's side of trials: starts the trial server and sends jobs to it
trial_server  the process that forks one process per trial
grammar_trial what a trial does, and its messages
compiled      grammars over a model's vocabulary, and the masks they give
kept          results for the next time
check         what could not be enforced, looked at afterwards
"""
