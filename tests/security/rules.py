"""The expected answers of each route, written independently of the server's code.

    answer := 401  the credential is not valid, whatever is at the path
            | 403  the credential lacks the scope of the route
            | 405  the route does not take the method
            | 404  nothing is at the path
            | the status of the route's own answer to the request of the matrix: a body of `{}`

An open route answers without a credential, but only to the methods it takes. A path is percent-decoded once and
compared as it is: nothing is normalised.
"""

from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

from tests.security.credentials import Credential


@dataclass(frozen=True)
class Rule:
    scope: str | None
    """None: the route is open."""
    answers: dict[str, int] = field(default_factory=dict)


RULES: dict[str, Rule] = {
    "/": Rule(None, {"GET": 200}),
    "/health": Rule(None, {"GET": 200}),
    "/ready": Rule(None, {"GET": 200}),
    "/ping": Rule(None, {"GET": 200}),
    "/version": Rule(None, {"GET": 200}),
    "/v1/models": Rule("models", {"GET": 200}),
    "/v1/chat/completions": Rule("chat", {"POST": 400}),
    "/v1/chat/completions/render": Rule("chat", {"POST": 400}),
    "/v1/chat/completions/input_tokens": Rule("chat", {"POST": 400}),
    "/v1/completions": Rule("completions", {"POST": 400}),
    "/v1/messages": Rule("messages", {"POST": 400}),
    "/v1/messages/count_tokens": Rule("messages", {"POST": 400}),
    "/v1/responses": Rule("responses", {"POST": 400, "GET": 405}),
    "/v1/responses/input_tokens": Rule("responses", {"POST": 400}),
    "/v1/responses/compact": Rule("responses", {"POST": 400}),
    "/v1/files": Rule("files", {"POST": 415, "GET": 200}),
    "/v1/conversations": Rule("responses", {"POST": 200}),
    "/v1/embeddings": Rule("embeddings", {"POST": 400}),
    "/v1/rerank": Rule("rerank", {"POST": 400}),
    "/v1/batches": Rule("batches", {"POST": 400, "GET": 200}),
    "/v1/messages/batches": Rule("messages", {"POST": 400, "GET": 200}),
    "/tokenize": Rule("tokens", {"POST": 400}),
    "/detokenize": Rule("tokens", {"POST": 400}),
    "/metrics": Rule("stats", {"GET": 200}),
    "/stats": Rule("stats", {"GET": 200}),
    "/admin/models": Rule("admin", {"GET": 200}),
    "/admin/usage": Rule("admin", {"GET": 200}),
    "/v1/organization/usage/completions": Rule("stats", {"GET": 400}),
    "/admin/reload": Rule("admin", {"POST": 200}),
    "/admin/upstreams": Rule("admin", {"GET": 200}),
    "/admin/upstreams/drain": Rule("admin", {"POST": 400}),
}
RULES_BELOW: dict[str, tuple[str, Rule]] = {
    "/v1/models/": ("echo", Rule("models", {"GET": 200})),
    "/v1/responses/": ("resp_0", Rule("responses", {"GET": 404, "DELETE": 404, "POST": 404})),
    "/v1/files/": ("file-0", Rule("files", {"GET": 404, "DELETE": 404})),
    "/v1/conversations/": ("conv_0", Rule("responses", {"GET": 404, "DELETE": 404, "POST": 400})),
    "/v1/batches/": ("batch_0", Rule("batches", {"GET": 404, "POST": 404})),
    "/v1/messages/batches/": ("msgbatch_0", Rule("messages", {"GET": 404, "DELETE": 404, "POST": 404})),
    "/admin/models/": ("echo/load", Rule("admin", {"POST": 200})),
}
"""By prefix: a name below it that the matrix asks for, and the rule for all names."""
SAMPLES = [*RULES, *(f"{prefix}{name}" for prefix, (name, _) in RULES_BELOW.items())]
"""One path for each route."""


def decoded_path(target: bytes) -> str:
    """The path of a request target in origin form or absolute form."""
    if target.startswith(b"http://"):
        target = b"/" + target.removeprefix(b"http://").partition(b"/")[2]
    path = target.partition(b"#")[0].partition(b"?")[0]
    return unquote_to_bytes(path).decode("utf-8", "replace")


def allowed_statuses(method: str, path: str, credential: Credential) -> set[int]:
    is_exact = path in SAMPLES
    rule = _rule_at(path)
    asked = "GET" if method == "HEAD" else method
    if rule is not None and rule.scope is None and asked in rule.answers:
        return {rule.answers[asked]}
    if credential.scopes is None:
        return {401}
    if rule is None:
        # A path that only begins like a route's may be refused for the scope of that route.
        return {403, 404}
    if rule.scope is not None and rule.scope not in credential.scopes:
        return {403}
    if asked not in rule.answers:
        return {405}
    # The credential is right, and the route decides about other names below its prefix.
    return {rule.answers[asked]} if is_exact else {200, 400, 404}


def _rule_at(path: str) -> Rule | None:
    if path in RULES:
        return RULES[path]
    found = [rule for prefix, (_, rule) in RULES_BELOW.items() if path.startswith(prefix) and path != prefix]
    return found[0] if found else None
