"""The wire codec: a payload as one flat array of bytes, near the entropy bound, and safe to read from anyone.

A message is ``{"fp1": uint8[...]}``; the key names format and version. The bytes are four sections,
little-endian, with nothing between or after them::

    header | bitmaps | ANS words | values

*Header.* One entry per tensor, in order. An entry begins with a lead byte in one of two forms, most significant bit
first:

- short ``[last][0][ndim - 1: 2][name length: 4]``: a float32 tensor with a mask, of 1 to 4 dimensions;
- long ``[last][1][kind: 3][dtype: 3]``: any tensor; the varints ``ndim`` and ``name length`` follow.

The UTF-8 name and ``ndim`` varint sizes come next. Unless the tensor is dense, the varint kept count ``k`` ends the
entry. A varint is LEB128 in the fewest bytes. ``last`` is set on the final entry. A payload without tensors is zero
bytes.

*Masks.* The size ``n`` and the kept count ``k`` determine a mask's encoding, so no other field is needed:

- A mask that keeps nothing or everything needs no bits.
- A mask whose density is within 1/16 of one half is sent as a bitmap. Entropy coding would save 1.2 % of the bitmap at
  most and take many times as long.
- Any other mask is entropy-coded.

*ANS words.* All entropy-coded masks share one stack of asymmetric numeral systems (Duda, arXiv:1311.2540;
constriction's ``AnsCoder``: 32-bit words, 24-bit probabilities). A mask is i.i.d. Bernoulli with probability
``round(2^24 k / n) / 2^24``, which both sides compute in integers. The stack starts on up to four bytes
borrowed from the values, below a 1 word ("bits back"). The start of the stack then costs 1 bit instead of 33. The
zero bytes that end the last word are dropped.

*Values.* The kept values of each tensor follow in row-major order, bit for bit, without the borrowed bytes. A boolean
tensor with a mask has none: it equals its mask, so a mask can be sent alone.

The encoding is canonical: :func:`encode` reproduces the bytes of every message that :func:`decode` accepts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import constriction
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedprune_app.core import masked_tensors
from fedprune_app.core.payload import Payload

KEY = "fp1"
MAX_TENSORS = 1 << 14
MAX_NAME_BYTES = 1024
MAX_DIMENSIONS = 16

_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)  # the index is the code on the wire
# The integers that carry a dtype's bits, by item size.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DENSE, _MASKED = range(2)  # kinds of tensor: no mask; mask sent

_LAST, _LONG = 0x80, 0x40
_LENT_BYTES = 4
_PRECISION = 24
_CHUNK = 1 << 16  # symbols per coder call: its int32 symbols stay in cache

Bytes = NDArray[np.uint8]
Bools = NDArray[np.bool_]


class _Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: int
    kept: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_mask_alone(self) -> bool:
        return self.kind == _MASKED and self.dtype == torch.bool

    @property
    def value_bytes(self) -> int:
        return 0 if self.is_mask_alone else self.kept * self.dtype.itemsize

    @property
    def is_bitmap(self) -> bool:
        return self._has_bits and self._is_near_half

    @property
    def is_coded(self) -> bool:
        return self._has_bits and not self._is_near_half

    @property
    def bitmap_bytes(self) -> int:
        return -(-self.numel // 8) if self.is_bitmap else 0

    @property
    def _has_bits(self) -> bool:
        return self.kind == _MASKED and 0 < self.kept < self.numel

    @property
    def _is_near_half(self) -> bool:
        return 8 * abs(2 * self.kept - self.numel) <= self.numel  # |k/n - 1/2| <= 1/16


_KNOWN: WeakKeyDictionary[Payload, dict[str, Bytes]] = WeakKeyDictionary()


def encode_once(payload: Payload) -> dict[str, Bytes]:
    """Encode ``payload`` and cache the result as long as the payload lives; :func:`encode` then returns it too.

    For a payload that is both saved and sent. Its tensors must not be modified.
    """
    return _KNOWN.setdefault(payload, encode(payload))


def encode(payload: Payload) -> dict[str, Bytes]:
    """Return ``payload`` as bytes: each masked tensor's kept values, and its mask in the cheapest form.

    Values off the mask are zero by the payload's contract; they are neither sent nor checked. Decoded masks are in the
    order of the tensors. The bytes depend on the payload alone, not on the machine. The function allocates one copy of
    the kept values in addition to the result.

    Raises ``ValueError`` for a dtype, a name, a number of dimensions or a number of tensors that the format cannot
    represent.

    >>> kept = torch.tensor([False, True, False, False, False, False, False, True])
    >>> payload = Payload.pruned({"w": torch.arange(8.0)}, {"w": kept})
    >>> message = encode(payload)
    >>> len(message[KEY])  # two float32 values in 8 bytes, and 5 bytes for name, shape, count and mask
    13
    >>> decode(message).tensors["w"].tolist()
    [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 7.0]
    """
    if (message := _KNOWN.get(payload)) is not None:
        return message
    if len(payload.tensors) > MAX_TENSORS:
        raise ValueError(f"a payload of {len(payload.tensors)} tensors, allowed: at most {MAX_TENSORS}")
    entries: list[_Entry] = []
    masks: list[Bools] = []  # flat; empty for a dense tensor
    values: list[Bytes] = []
    for name, tensor in payload.tensors.items():
        mask = payload.masks.get(name)
        flat_mask = np.empty(0, np.bool_) if mask is None else mask.cpu().numpy().reshape(-1)
        num_kept = tensor.numel() if mask is None else int(np.count_nonzero(flat_mask))
        entry = _Entry(name, tuple(tensor.shape), tensor.dtype, _DENSE if mask is None else _MASKED, num_kept)
        _check_writable(entry)
        entries.append(entry)
        masks.append(flat_mask)
        values.append(_kept_bits(tensor, entry, flat_mask))

    bitmaps = [np.packbits(m, bitorder="little") for e, m in zip(entries, masks, strict=True) if e.is_bitmap]
    coded_masks = [(entry, mask) for entry, mask in zip(entries, masks, strict=True) if entry.is_coded]
    words = np.empty(0, np.uint8)
    if coded_masks:
        lender = next((index for index, piece in enumerate(values) if piece.size), 0)  # masks alone have no values
        words = _ans_encode(coded_masks, values[lender][:_LENT_BYTES])
        values[lender] = values[lender][_LENT_BYTES:]
    return {KEY: np.concatenate([np.frombuffer(_write_header(entries), np.uint8), *bitmaps, words, *values])}


def counted(shape: Sequence[int]) -> int:
    """Return how many values a tensor of this shape counts for in ``max_bytes`` of :func:`decode`.

    An empty tensor counts its other sizes too, because torch multiplies them.
    """
    return math.prod(max(size, 1) for size in shape)


def decode(arrays: Mapping[str, np.ndarray], *, max_bytes: int = 2**31) -> Payload:
    """Return the payload that :func:`encode` wrote.

    ``max_bytes`` bounds the memory of the result (values, and 1 byte per element of a mask), so that a few bytes cannot
    claim a large tensor. Pass the size of the expected model where it is known.

    Anything but a well-formed message raises ``ValueError`` with one line. Every declared size is checked against the
    bytes present before memory is allocated. Every mask is checked against its declared count after decoding.
    """
    body = _message_body(arrays)
    reader = _Reader(body.data)
    entries = _read_header(reader, max_bytes)
    coded_entries = [entry for entry in entries if entry.is_coded]
    lender = next((entry for entry in entries if entry.value_bytes), None) if coded_entries else None
    num_lent = min(_LENT_BYTES, lender.value_bytes) if lender else 0
    num_declared = sum(e.bitmap_bytes + e.value_bytes for e in entries)
    num_ans = len(body) - reader.position - (num_declared - num_lent)  # the one section of undeclared length
    if num_ans < 0 or (num_ans > 0 and not coded_entries):
        raise ValueError(f"a message of {len(body)} bytes, its header declares {reader.position + num_declared}")

    masks: dict[str, Bools] = {}
    for entry in entries:
        if entry.kind == _MASKED and entry.kept in (0, entry.numel):
            masks[entry.name] = np.full(entry.numel, entry.kept > 0)
    for entry in entries:
        if entry.is_bitmap:
            masks[entry.name] = _unpack(entry, np.frombuffer(reader.take(entry.bitmap_bytes), np.uint8))
    lent_bytes = np.empty(0, np.uint8)
    if coded_entries:
        coded_masks, lent_bytes = _ans_decode(coded_entries, reader.take(num_ans), num_lent)
        masks |= coded_masks

    tensors = {}
    for entry in entries:
        piece = np.frombuffer(reader.take(entry.value_bytes - (num_lent if entry is lender else 0)), np.uint8)
        if entry is lender:
            piece = np.concatenate([lent_bytes, piece])
        tensors[entry.name] = _decode_tensor(entry, piece, masks.get(entry.name))
    return Payload(
        tensors,
        {e.name: torch.from_numpy(masks[e.name]).reshape(e.shape) for e in entries if e.kind != _DENSE},
    )


def pack(payload: Payload) -> memoryview:
    """Return the bytes that :func:`encode` writes, as the content of a file."""
    return encode(payload)[KEY].data


def unpack(data: bytes | memoryview, max_bytes: int) -> Payload:
    """Return the payload that :func:`pack` wrote; ``data`` and ``max_bytes`` are checked as in :func:`decode`."""
    return decode({KEY: np.frombuffer(data, dtype=np.uint8)}, max_bytes=max_bytes)


# Header


def _write_header(entries: Sequence[_Entry]) -> bytes:
    header = bytearray()
    for index, entry in enumerate(entries):
        name = entry.name.encode()
        last_flag = _LAST if index == len(entries) - 1 else 0
        is_plain = entry.kind == _MASKED and entry.dtype == torch.float32
        if is_plain and 1 <= len(entry.shape) <= 4 and len(name) < 16:
            header.append(last_flag | (len(entry.shape) - 1) << 4 | len(name))
        else:
            header.append(last_flag | _LONG | entry.kind << 3 | _DTYPES.index(entry.dtype))
            header += varint(len(entry.shape)) + varint(len(name))
        header += name
        for size in entry.shape:
            header += varint(size)
        if entry.kind != _DENSE:
            header += varint(entry.kept)
    return bytes(header)


def _read_header(reader: _Reader, max_bytes: int) -> list[_Entry]:
    entries: list[_Entry] = []
    names: set[str] = set()
    decoded_bytes = 0
    is_last = reader.is_at_end
    while not is_last:
        if len(entries) == MAX_TENSORS:
            raise ValueError(f"a message of more than {MAX_TENSORS} tensors")
        is_last, entry = _read_entry(reader, f"tensor number {len(entries)}")
        if entry.name in names:
            raise ValueError(f"tensor {entry.name!r} occurs twice in a message")
        if entry.kept > entry.numel:
            raise ValueError(f"tensor {entry.name!r} declares {entry.kept} kept of {entry.numel} elements")
        decoded_bytes += counted(entry.shape) * (entry.dtype.itemsize + entry.kind)  # a mask has a byte each
        if decoded_bytes > max_bytes:
            raise ValueError(f"a message decodes to more than the allowed {max_bytes} bytes, at tensor {entry.name!r}")
        names.add(entry.name)
        entries.append(entry)
    if _write_header(entries) != reader.taken():
        raise ValueError("a message whose header is not in its one shortest form")
    return entries


def _read_entry(reader: _Reader, label: str) -> tuple[bool, _Entry]:
    lead = reader.take(1)[0]
    kind, dtype = _MASKED, torch.float32
    num_dims, num_name_bytes = (lead >> 4 & 3) + 1, lead & 15
    if lead & _LONG:
        kind, dtype = lead >> 3 & 7, _DTYPES[lead & 7]
        num_dims, num_name_bytes = reader.varint(), reader.varint()
    for field_name, value, limit in (
        ("kind", kind, _MASKED),
        ("number of dimensions", num_dims, MAX_DIMENSIONS),
        ("name length", num_name_bytes, MAX_NAME_BYTES),
    ):
        if value > limit:
            raise ValueError(f"{label} of a message has {field_name} {value}, allowed: at most {limit}")
    try:
        name = bytes(reader.take(num_name_bytes)).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{label} of a message has a name that is not UTF-8") from None
    shape = tuple(reader.varint() for _ in range(num_dims))
    num_kept = math.prod(shape) if kind == _DENSE else reader.varint()
    return bool(lead & _LAST), _Entry(name, shape, dtype, kind, num_kept)


def _check_writable(entry: _Entry) -> None:
    if entry.dtype not in _DTYPES:
        allowed = ", ".join(str(dtype) for dtype in _DTYPES)
        raise ValueError(f"tensor {entry.name!r} has dtype {entry.dtype}, allowed: {allowed}")
    if len(entry.shape) > MAX_DIMENSIONS:
        raise ValueError(f"tensor {entry.name!r} has {len(entry.shape)} dimensions, allowed: {MAX_DIMENSIONS}")
    try:
        num_name_bytes = len(entry.name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"tensor name {entry.name!r} cannot be written as UTF-8") from None
    if num_name_bytes > MAX_NAME_BYTES:
        raise ValueError(f"tensor name {entry.name!r} has {num_name_bytes} bytes, allowed: {MAX_NAME_BYTES}")


def varint(value: int) -> bytes:
    """Return a non-negative number as LEB128, as in protobuf: seven bits a byte, lowest bits first.

    >>> varint(300).hex()
    'ac02'
    """
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


class _Reader:
    """A cursor over the bytes of a message that never reads past their end."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.position = 0

    @property
    def is_at_end(self) -> bool:
        return self.position == len(self._view)

    def take(self, count: int) -> memoryview:
        if count > len(self._view) - self.position:
            raise ValueError(f"a message of {len(self._view)} bytes ends too early")
        self.position += count
        return self._view[self.position - count : self.position]

    def taken(self) -> bytes:
        return bytes(self._view[: self.position])

    def varint(self) -> int:
        value = 0
        for shift in range(0, 63, 7):  # sizes stay below 2^63
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("a message holds a number above 2^63 - 1")


def _message_body(arrays: Mapping[str, np.ndarray]) -> Bytes:
    if list(arrays) != [KEY]:
        raise ValueError(f"a message has the arrays {_brief(list(arrays))}, allowed: exactly {KEY!r}")
    body = arrays[KEY]
    if not isinstance(body, np.ndarray) or body.dtype != np.uint8 or body.ndim != 1:
        kind = f"{body.dtype} with {body.ndim} dimensions" if isinstance(body, np.ndarray) else type(body).__name__
        raise ValueError(f"array {KEY!r} of a message is {kind}, allowed: uint8 with 1 dimension")
    return np.ascontiguousarray(body)


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# Masks


def _unpack(entry: _Entry, bitmap: Bytes) -> Bools:
    bits = np.unpackbits(bitmap, bitorder="little")
    mask = bits[: entry.numel].view(np.bool_)
    if bits[entry.numel :].any():
        raise ValueError(f"tensor {entry.name!r} has a bitmap with bits beyond its {entry.numel} elements")
    _check_count(entry, mask)
    return mask


def _check_count(entry: _Entry, mask: Bools) -> None:
    count = int(np.count_nonzero(mask))
    if count != entry.kept:
        raise ValueError(f"tensor {entry.name!r} declares {entry.kept} kept elements, its mask keeps {count}")


def _numerator(entry: _Entry) -> int:
    """Return an entry's density in 24 bits, strictly between 0 and 1."""
    scale = 1 << _PRECISION
    return min(max((entry.kept * scale + entry.numel // 2) // entry.numel, 1), scale - 1)


def _bernoulli(entry: _Entry) -> Any:
    # perfect=True represents such a dyadic probability exactly; perfect=False shifts it by some 2^-24.
    return constriction.stream.model.Bernoulli(_numerator(entry) / (1 << _PRECISION), perfect=True)


def _ans_encode(coded_masks: Sequence[tuple[_Entry, Bools]], lent_bytes: Bytes) -> Bytes:
    """Return one stack of all masks, the last mask at the bottom, on top of the borrowed bytes and a 1 word."""
    base = int.from_bytes(lent_bytes.tobytes(), "little")
    words: NDArray[np.uint32]
    if masked_tensors.is_usable():  # without Python's lock, which constriction holds
        stack = np.array([1 << 32 | base, 0], np.uint64)
        words = np.empty(sum(mask.size // 16 + 4 for _, mask in coded_masks), np.uint32)
        for entry, mask in reversed(coded_masks):
            masked_tensors.push(mask, _numerator(entry), stack, words)
        words = np.append(words[: int(stack[1])], stack[:1].view(np.uint32))
    else:
        coder = constriction.stream.stack.AnsCoder(np.array([base, 1], np.uint32))
        for entry, mask in reversed(coded_masks):
            model = _bernoulli(entry)
            for start in reversed(range(0, mask.size, _CHUNK)):
                coder.encode_reverse(mask[start : start + _CHUNK].astype(np.int32), model)
        words = coder.get_compressed()
    num_zero_bytes = 4 - -(-int(words[-1]).bit_length() // 8)  # the last word is never zero
    return words.astype("<u4").view(np.uint8)[: 4 * len(words) - num_zero_bytes]


def _ans_decode(entries: Sequence[_Entry], data: memoryview, num_lent: int) -> tuple[dict[str, Bools], Bytes]:
    """Return the masks and the borrowed bytes; these bytes and the 1 word must be all that remains of the stack."""
    if not data or data[-1] == 0:
        raise ValueError("a message whose entropy-coded masks are missing or end in a zero byte")
    words = np.frombuffer(bytes(data) + bytes(-len(data) % 4), "<u4").astype(np.uint32)
    if masked_tensors.is_usable():
        state = int.from_bytes(words[-2:].tobytes(), "little")
        stack = np.array([state, max(len(words) - 2, 0)], np.uint64)
        masks = {e.name: masked_tensors.pop(e.numel, _numerator(e), stack, words) for e in entries}
        seal, base = divmod(0 if stack[1] else int(stack[0]), 1 << 32)
    else:
        coder = constriction.stream.stack.AnsCoder(words)
        masks = {}
        for entry in entries:
            model = _bernoulli(entry)
            masks[entry.name] = mask = np.empty(entry.numel, np.bool_)
            for start in range(0, mask.size, _CHUNK):
                mask[start : start + _CHUNK] = coder.decode(model, min(_CHUNK, mask.size - start))
        base, seal = coder.get_compressed().tolist() if coder.num_words() == 2 else (0, 0)
    for entry in entries:
        _check_count(entry, masks[entry.name])
    if seal != 1 or base >> 8 * num_lent:
        raise ValueError("a message whose entropy-coded masks do not use up their bytes")
    return masks, np.frombuffer(base.to_bytes(4, "little")[:num_lent], np.uint8)


# Values


def _kept_bits(tensor: Tensor, entry: _Entry, mask: Bools) -> Bytes:
    if entry.is_mask_alone:
        if not np.array_equal(tensor.detach().cpu().numpy().reshape(-1), mask):
            raise ValueError(f"boolean tensor {entry.name!r} differs from its mask, allowed: the mask itself")
        return np.empty(0, np.uint8)
    flat = np.ascontiguousarray(tensor.detach().cpu().reshape(-1).view(_BITS[entry.dtype.itemsize]).numpy())
    if entry.kept < entry.numel:
        values = masked_tensors.gather(flat, mask, entry.kept)
        flat = flat[np.flatnonzero(mask)] if values is None else values  # five times as fast as flat[mask]
    return flat.astype(flat.dtype.newbyteorder("<"), copy=False).view(np.uint8)


def _decode_tensor(entry: _Entry, piece: Bytes, mask: Bools | None) -> Tensor:
    if mask is not None and entry.is_mask_alone:
        return torch.from_numpy(mask.copy()).reshape(entry.shape)
    if entry.dtype == torch.bool and (piece > 1).any():
        raise ValueError(f"tensor {entry.name!r} holds a boolean that is neither 0 nor 1")
    native = np.dtype(f"i{entry.dtype.itemsize}")
    flat = None
    if mask is not None and entry.kept < entry.numel:
        flat = masked_tensors.spread(piece, mask, native)
        if flat is None:
            flat = np.zeros(entry.numel, native)
            flat[np.flatnonzero(mask)] = piece.view(native.newbyteorder("<"))
    if flat is None:  # The copy aligns the values, which lie at any offset of the message.
        flat = np.array(piece.view(native.newbyteorder("<")), dtype=native)
    return torch.from_numpy(flat).view(entry.dtype).reshape(entry.shape)
