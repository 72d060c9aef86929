"""Constrained decoding: grammars that make a reply match a JSON schema, a regular expression or the tools of a request.

constraints    ConstraintCompiler: from a request to a compiled grammar, with a cache and limits per caller
reply_grammar  the grammar of a whole reply
call_grammar   the grammar of tool calls, for every call syntax
argument_values  the grammar of arguments that are not one JSON text
lark           building blocks of grammar text
schema         the part of a JSON schema that can be enforced
schema_walk    subschemas, paths, references and endless recursion
schema_limits  patterns and numbers that can be enforced
schema_check   validation of finished replies against keywords that were not enforced
masks          grammars over a vocabulary, and token masks
trial_client, trial_server  compiling untrusted grammars in a separate process
lru_cache      a bounded cache
"""
