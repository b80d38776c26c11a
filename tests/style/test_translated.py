"""What torch's store or groups are asked is asked inside `wire.translated`: see its [Note: one translation]."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.style.tables import source

GROUP_CALLS = {
    "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "init_process_group", "new_group",
    "new_subgroups_by_enumeration", "recv", "reduce_scatter", "send",
}  # fmt: skip
STORE_CALLS = {"add", "check", "compare_set", "delete_key", "get", "list_keys", "multi_get", "set", "wait"}
LEFT_TO_TORCH = {
    "bench": "its jobs end with torch's own error",
    "parallel/instrument/training_facts": "a hook of stock DDP: its errors are torch's",
    "comm/collectives": "what its callers wrap",
    "comm/world/rendezvous": "before there is a world; `world` wraps the rest",
}


def _is_asked(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    owner, name = ast.unparse(call.func.value), call.func.attr
    return (owner == "dist" and name in GROUP_CALLS) or (
        (owner == "store" or owner.endswith(".store")) and name in STORE_CALLS
    )


def _catches(node: ast.AST) -> bool:
    if isinstance(node, ast.With):
        said = [ast.unparse(item.context_expr) for item in node.items]
        return any(text.startswith(("translated(", "suppress(RuntimeError")) for text in said)
    if isinstance(node, ast.Try):
        caught = [ast.unparse(handler.type) for handler in node.handlers if handler.type is not None]
        return any("RuntimeError" in kinds or "BaseException" in kinds for kinds in caught)
    return False


def _bare_calls(node: ast.AST, caught: bool = False) -> Iterator[ast.Call]:
    if isinstance(node, ast.Call) and _is_asked(node) and not caught:
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _bare_calls(child, caught or _catches(node))


def test_a_bare_call_is_found() -> None:
    text = "with translated(w, 'x'):\n    dist.broadcast(t)\nself.here.store.set('a', 'b')\ndist.is_initialized()"
    assert [call.lineno for call in _bare_calls(ast.parse(text))] == [3]


def test_store_and_groups_are_asked_inside_translated() -> None:
    found = [
        f"{module}:{call.lineno}: {ast.unparse(call)}"
        for module, tree in source().modules.items()
        if not any(module == left or module.startswith(f"{left}/") for left in LEFT_TO_TORCH)
        for call in _bare_calls(tree)
    ]
    assert found == []
