"""Files with a digest: a reader detects changed content, and content about something else.

SHA-256 finds damage, not malice: whoever can write a file can write its digest too.
"""

import hashlib
import json

from fedprune_app.core.named import ValueDict, Values

# The field of the digest in a JSON object.
KEY = "content_sha256"
_START = b"fedprune seal "
_MAX_LINE = 4096


def json_with_digest(content: Values) -> ValueDict:
    """Return the object with its digest as the last field."""
    fields = {key: value for key, value in content.items() if key != KEY}
    return {**fields, KEY: _json_digest(fields)}


def check_json(content: Values) -> None:
    """Raise ``ValueError`` for an object that is not as :func:`json_with_digest` returned it."""
    if KEY not in content:
        raise ValueError("it has no digest")
    if _json_digest({key: value for key, value in content.items() if key != KEY}) != content[KEY]:
        raise ValueError("its content is not what was written")


def with_digest(body: bytes | memoryview, about: Values) -> bytes:
    """Return a file's content: one line with the digest and ``about``, which describes the file, then ``body``.

    >>> content = with_digest(b"weights", {"client": 3})
    >>> bytes(verified_body(content, {"client": 3}))
    b'weights'
    >>> verified_body(content, {"client": 4})
    Traceback (most recent call last):
    ValueError: it is {'client': 3}, allowed here: {'client': 4}
    """
    line = {"about": dict(about), "sha256": _digest(body, about)}
    return b"".join([_START, json.dumps(line).encode(), b"\n", body])


def verified_body(content: bytes, about: Values) -> memoryview:
    """Return the body that :func:`with_digest` wrote; its ``about`` must include every entry of ``about``.

    Raises ``ValueError`` for content that is damaged, cut, empty or about something else.
    """
    end = content.find(b"\n", 0, _MAX_LINE)
    body = memoryview(content)[end + 1 :]
    try:
        line = json.loads(content[len(_START) : end])
        header, digest = dict(line["about"]), line["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError):
        header, digest = {}, ""
    if not content.startswith(_START) or digest != _digest(body, header):
        raise ValueError("its content is not what was written")
    if about.items() - header.items():
        raise ValueError(f"it is {header}, allowed here: {dict(about)}")
    return body


def _digest(body: bytes | memoryview, about: Values) -> str:
    total = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    total.update(body)
    return total.hexdigest()


def _json_digest(content: Values) -> str:
    as_read = json.loads(json.dumps(content, sort_keys=True, allow_nan=False))  # keys are texts, unlike numbers sorted
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()
