"""Ways to damage a file: of a checkpoint, or of a cache."""

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .fuzz import change_value, changed_bytes

# Changes a file in place.
Damage = Callable[[random.Random, Path], object]


def truncate(draw: random.Random, file: Path) -> None:
    """Cut the end off, as a full disk or a broken copy does."""
    os.truncate(file, draw.randrange(file.stat().st_size + 1))


def empty(_: random.Random, file: Path) -> None:
    """Leave no byte."""
    file.write_bytes(b"")


def remove(_: random.Random, file: Path) -> None:
    """Remove the file."""
    file.unlink()


def become_a_folder(_: random.Random, file: Path) -> None:
    """Put a folder in its place."""
    file.unlink()
    file.mkdir()


def become_a_dead_link(_: random.Random, file: Path) -> None:
    """Put a link to nothing in its place."""
    file.unlink()
    file.symlink_to(file.with_name("nowhere"))


def change_bytes(draw: random.Random, file: Path) -> None:
    """Change bytes anywhere."""
    file.write_bytes(changed_bytes(draw, file.read_bytes()))


def change_beginning(draw: random.Random, file: Path) -> None:
    """Change bytes among the first hundred, where formats have their heads."""
    data = file.read_bytes()
    file.write_bytes(changed_bytes(draw, data[:100]) + data[100:])


def append(draw: random.Random, file: Path) -> None:
    """Add bytes at the end."""
    file.write_bytes(file.read_bytes() + draw.randbytes(draw.randint(1, 5000)))


def change_json(draw: random.Random, file: Path) -> None:
    """Replace, remove or add values of a JSON file."""
    content = json.loads(file.read_text())
    for _ in range(draw.choice((1, 1, 1, 2))):
        change_value(draw, content)
    file.write_text(json.dumps(content))


def change_safetensors(draw: random.Random, file: Path) -> None:
    """Change the head of a safetensors file: names, shapes, data types, offsets, or its size."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    head: dict[str, Any] = json.loads(data[8 : 8 + size])
    choice = draw.random()
    if choice < 0.2:
        size = draw.choice((0, 1, size - 1, size + 1, len(data), 2**31, 2**63))
        file.write_bytes(struct.pack("<Q", size) + data[8:])
        return
    name = draw.choice(sorted(head))
    if choice < 0.4:
        head[draw.choice(("", "a", "é" * 300, f"{name}.x"))] = head.pop(name)
    else:
        change_value(draw, head if choice < 0.5 else head[name])
    changed = json.dumps(head).encode()
    file.write_bytes(struct.pack("<Q", len(changed)) + changed + data[8 + size :])


ANY: tuple[Damage, ...] = (
    truncate,
    empty,
    remove,
    become_a_folder,
    become_a_dead_link,
    change_bytes,
    change_beginning,
    append,
)


def damage(draw: random.Random, file: Path) -> str:
    """Damage a file in a way that fits its format, and return how."""
    chosen: Damage = draw.choice(ANY)
    if file.suffix == ".json" and draw.random() < 0.7:
        chosen = change_json
    elif file.suffix == ".safetensors" and draw.random() < 0.6:
        chosen = change_safetensors
    chosen(draw, file)
    return f"{chosen.__name__} {file.name}"
