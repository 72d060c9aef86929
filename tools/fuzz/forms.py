"""Generates uploads: valid, odd and damaged forms with a file; and sessions with a stored file."""

from random import Random

from tools.fuzz import bodies
from tools.fuzz.cases import LAST_ID, OK, Request
from tools.fuzz.servers import FILE_BYTES, KEYS

FILES = "/v1/files"
BEARER = ("authorization", f"Bearer {KEYS[0]}")
OTHER = ("authorization", f"Bearer {KEYS[1]}")
VERSION = ("anthropic-version", "2023-06-01")
REFUSED = frozenset({400, 413, 415})
NAMES = (
    *(b"a.jsonl", b"", b"..", b"../../etc/passwd", b"C:\\a\\b.txt", b"a\0b", b"a%0d%0ab", b"a\r\nX: y", b"n" * 600),
    *("größe\u202etxt.exe".encode(), b"\xff\xfe", b'quo"te', b"a; name=purpose", b" "),
)
TYPES = (
    b"",
    b"application/jsonl",
    b"text/html",
    b"text/html; charset=\xff",
    b"x" * 300,
    b"multipart/mixed; boundary=y",
)
QUERIES = (
    *("", "?limit=1", "?limit=0", "?order=asc", "?order=x", "?purpose=batch", "?purpose=x", "?after=x", "?limit=99999"),
    *("?before_id=x", "?after_id=%00", "?page=page_x", "?ids[]=x&ids[]=y", "?scope_id=x", "?after=" + LAST_ID.decode()),
)


def session(random: Random) -> list[Request]:
    """An upload. If it is valid, requests for the stored file follow."""
    if random.random() < 0.5:
        return [_odd_upload(random)]
    version = (VERSION,) if random.random() < 0.4 else ()
    fields = {} if version else {b"purpose": random.choice((b"batch", b"user_data", b"vision", b"assistants"))}
    data = _form(random, b"cut", fields)
    made = [Request("POST", FILES, data, (_type(b"cut"), BEARER, *version))]
    by_id = f"{FILES}/{LAST_ID.decode()}"
    for _ in range(random.randint(1, 4)):
        kind = random.randrange(5)
        path = by_id + random.choice(("", "/content"))
        if kind == 0:
            made.append(Request(random.choice(("GET", "HEAD")), path, b"", (BEARER, *version)))
        elif kind == 1:
            # The id is that of another tenant.
            made.append(Request(random.choice(("GET", "HEAD")), path, b"", (OTHER, *version), frozenset({404})))
            made.append(Request("DELETE", by_id, b"", (OTHER, *version), frozenset({404})))
        elif kind == 2:
            query = FILES + random.choice(QUERIES)
            made.append(Request("GET", query, b"", (BEARER, *version), OK | {400}))
        elif kind == 3:
            made.append(Request("GET", by_id + random.choice(("/x", "/content/", "%00")), b"", (BEARER,), OK | {404}))
        else:
            made.append(Request("DELETE", by_id, b"", (BEARER, *version)))
            made.append(Request("GET", by_id, b"", (BEARER, *version), frozenset({404})))
            return made
    return made


def upload(content: bytes, purpose: bytes) -> Request:
    """An upload of this content by the first tenant."""
    file = b'--cut\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n%b\r\n' % content
    field = b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n%b\r\n' % purpose
    return Request("POST", FILES, field + file + b"--cut--\r\n", (_type(b"cut"), BEARER), OK | {413})


def _type(boundary: bytes) -> tuple[str, str]:
    return ("content-type", f"multipart/form-data; boundary={boundary.decode('latin-1')}")


def _form(
    random: Random, boundary: bytes, fields: dict[bytes, bytes], name: bytes = b"a.jsonl", media: bytes = b""
) -> bytes:
    content = bodies.words(random).encode() * random.choice((0, 1, 20))
    kind = b"\r\nContent-Type: " + media if media else b""
    file = b'Content-Disposition: form-data; name="file"; filename="%b"%b\r\n\r\n%b' % (name, kind, content)
    parts = [file, *(b'Content-Disposition: form-data; name="%b"\r\n\r\n%b' % field for field in fields.items())]
    random.shuffle(parts)
    return b"".join(b"--%b\r\n%b\r\n" % (boundary, part) for part in parts) + b"--%b--\r\n" % boundary


def _odd_upload(random: Random) -> Request:
    headers: tuple[tuple[str, str], ...] = (BEARER,)
    expect, boundary = OK | REFUSED, b"cut"
    fields = {b"purpose": b"batch"}
    data = _form(random, boundary, fields, random.choice(NAMES), random.choice(TYPES))
    kind = random.randrange(9)
    if kind == 0:
        data = data[: random.randrange(len(data))]
    elif kind == 1:
        for _ in range(random.randint(1, 8)):
            at = random.randrange(len(data))
            data = data[:at] + random.choice((b"\r\n", b"--cut", b"\0", b"\xff", b"", b"\n")) + data[at + 1 :]
    elif kind == 2:
        boundary = random.choice((b"", b"x", b"x" * 71, b"\xff", b'"a b"', b'"'))
    elif kind == 3:
        names = (
            b"expires_after[seconds]",
            b"expires_after[anchor]",
            b"expires_in_seconds",
            b"color",
            b"purpose[x]",
            b"",
        )
        fields |= {random.choice(names): random.choice((b"3600", b"-1", b"created_at", b"\xff", b"9" * 2000, b""))}
        data = _form(random, boundary, fields)
    elif kind == 4:
        data, expect = _form(random, boundary, fields).replace(b"\r\n\r\n", b"\r\n\r\n" + b"x" * FILE_BYTES), REFUSED
    elif kind == 5:
        data = data.replace(b"--cut--", data)
    elif kind == 6:
        headers = (BEARER, VERSION)
    elif kind == 7:
        headers = (*headers, ("origin", random.choice(("https://evil.example", "null", ""))))
    else:
        headers = (*headers, ("content-encoding", random.choice(("gzip", "x"))))
        expect = frozenset({415})
    return Request("POST", FILES, data, (_type(boundary), *headers), expect)
