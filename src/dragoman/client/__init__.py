"""Any server that speaks chat completions, Responses or Messages, from the other side.

    exchange    one question and its answer, without a socket: bytes in, events out; the PROTOCOLS table
      chat, messages, responses, completions        each encodes requests and reads replies
      saying, reading               what they have in common on the way out and on the way in
      draft, calls, usage           a reply, its tool calls and its counts, put together from what servers send
    wording     errors, recognised by the words of many servers
    retry       whether to ask again, and when
    talk        which calls to try, and what to make of the answers: all that both clients do between two reads
      address, listing, options     who we say we are; models, vectors, counts; what callers may say
      dicts                         messages and tools in the words of other clients
      schema, loop                  Python types and functions as JSON schemas; the loop that calls functions
    sync, asynchronous              `Client` and `AsyncClient`: httpx and nothing else, by way of `transport`
    gathering   what has been said so far
    unpacking   what came compressed, a little at a time
    line        what is awaited of httpx, for `AsyncClient` and for the upstream engine

Whoever brings bytes of their own needs `exchange.Exchange`, `wording` and `retry`: see the top of `exchange`. The
upstream engine brings only a transport, and is made of the rest: `talk`, `line`, `transport`, `listing`.
Everything here works on the values of `conversation` and `events`.
"""
