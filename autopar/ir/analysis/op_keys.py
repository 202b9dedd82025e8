"""Names that a person and a plan use for blocks and their ops: module paths where the model has them.

``model.layers.*`` is the kind of block that repeats under ``model.layers``; ``self_attn.q_proj/linear`` an
op in it. They come from one instance each and are the same in every capture of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.ir.analysis.op_stream import op_name


def starred_paths(instances: Sequence[Sequence[fx.Node]]) -> list[tuple[str, ...]]:
    """Module path of every node of the first instance, with ``*`` for what differs between instances."""
    paths = [_path(node) for node in instances[0]]
    for other in instances[1:]:
        for number, node in enumerate(other):
            path = _path(node)
            if len(path) == len(paths[number]):
                paths[number] = tuple(a if a == b else "*" for a, b in zip(paths[number], path, strict=True))
    return paths


def kind_name(
    paths: Sequence[tuple[str, ...]], nodes: Sequence[fx.Node], main: int, shared: set[str]
) -> tuple[str, ...]:
    """Name of a kind of block.

    A repeated one after the module whose index varies. Another after the module that holds all of it and
    nothing else (``shared``: modules with ops in several blocks), or else after its op with the largest
    parameter, number ``main``.
    """
    common = _common(paths)
    if "*" in common:
        return common[: len(common) - common[::-1].index("*")]
    if common and ".".join(common) not in shared:
        return common
    return paths[main] or common or (op_name(nodes[main]),)


def shared_modules(blocks: Sequence[Sequence[fx.Node]]) -> set[str]:
    """Paths of the modules that ops in several blocks come from."""
    seen: dict[str, int] = {}
    shared: set[str] = set()
    for index, nodes in enumerate(blocks):
        for path in {_path(node) for node in nodes}:
            for depth in range(1, len(path) + 1):
                module = ".".join(path[:depth])
                if seen.setdefault(module, index) != index:
                    shared.add(module)
    return shared


def instance_name(kind: tuple[str, ...], instance: Sequence[fx.Node], index: int) -> str:
    """Name of one instance: the kind's name with this instance's own path in place of the stars."""
    if "*" not in kind:
        return ".".join(kind)
    for node in instance:
        path = _path(node)[: len(kind)]
        if len(path) == len(kind) and all(a in (b, "*") for a, b in zip(kind, path, strict=True)):
            return ".".join(path)
    return f"{'.'.join(kind)}[{index}]"


def op_keys(kind: tuple[str, ...], paths: Sequence[tuple[str, ...]], nodes: Sequence[fx.Node]) -> list[str]:
    """Unique keys of the ops of a block: path below the block, ``/``, op name, ``:2`` for a second one."""
    seen: dict[str, int] = {}
    keys: list[str] = []
    for path, node in zip(paths, nodes, strict=True):
        below = path[len(kind) :] if path[: len(kind)] == kind else path
        key = "/".join(part for part in (".".join(below), op_name(node)) if part)
        seen[key] = seen.get(key, 0) + 1
        keys.append(key if seen[key] == 1 else f"{key}:{seen[key]}")
    return keys


def _path(node: fx.Node) -> tuple[str, ...]:
    path = str(node.meta.get("path", ""))
    return tuple(path.split(".")) if path else ()


def _common(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    common = paths[0] if paths else ()
    for path in paths[1:]:
        size = 0
        while size < min(len(common), len(path)) and common[size] == path[size]:
            size += 1
        common = common[:size]
    return common
