"""Every other server as an engine.

    options     what a configuration may say
    engine      the engine: which place is asked, what is tried elsewhere
    place       one server: how it is asked, what it has refused, what it offers
      wire      HTTP to it
      fitting   a request in the words that a protocol has and a place takes
      refusals  what a place does not take, from the words in which it says so
    pool        which place is asked next: loads, failures, beginnings of prompts; no socket, no clock of its own
      beginnings    who has which beginning of a prompt
    telling     errors of a place as those of ours

Nobody is called but the addresses of the configuration: redirects are not followed, proxies of the environment not
used, addresses of images not fetched and not passed on unless the operator says so.
"""
