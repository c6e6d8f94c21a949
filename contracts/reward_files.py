"""What can be known about a user's reward file without running it.

The control plane never executes user code: it reads the syntax tree, and so a typo is found at
submit time and not after a GPU was paid for.
"""

from __future__ import annotations

import ast
import posixpath
import sys
from collections.abc import Iterator, Sequence

from contracts.problems import Problem, nearest

__all__ = [
    "COMPLETIONS",
    "EASYR1_BATCH",
    "EASYR1_ONE",
    "GROUND_TRUTH",
    "INPUTS",
    "PREDICT",
    "PROVIDED_COLUMNS",
    "check_reward_file",
    "sibling_modules",
]

COMPLETIONS = "completions"
"""First parameter of ms-swift's and TRL's functions of a batch and its columns."""
INPUTS = "inputs"
"""Only parameter of ms-swift's plugins."""
EASYR1_BATCH, EASYR1_ONE = "reward_inputs", "reward_input"
"""Only parameter of EasyR1's functions, whatever its name where the file sets `REWARD_TYPE`."""
PREDICT = ("predict", "prediction", "predict_str", "completion", "response")
GROUND_TRUTH = ("ground_truth", "answer", "solution", "label")
"""First and second parameter of a plain function of one sample."""
PROVIDED_COLUMNS = (
    "prompts", "messages", "ground_truth", "response_length", "truncated", "is_truncated",
)  # fmt: skip
"""What a `(completions, **columns)` function may ask for besides the dataset's columns."""

_FIX = (
    "Accept `(completions, **columns)`, `(predict, ground_truth)`, `(reward_inputs)`, "
    "`(reward_input)` or `(inputs)`."
)
AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


def check_reward_file(
    source: str,
    function: str,
    *,
    path: str,
    columns: Sequence[str] | None = None,
    parameters: Sequence[str] = (),
) -> list[Problem]:
    """Problems of a reward file: syntax (with its line), the function, its parameters.

    Args:
        source: the file's text.
        function: name the run file gives; a function, a class, or a name bound to a callable.
        path: where the run file names the file, for the report.
        columns: dataset columns when they are known; None skips the column check.
        parameters: keyword arguments the run file passes.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        where = f"line {error.lineno}, column {error.offset}"
        text = (error.text or "").rstrip()
        return [Problem(path, text, f"syntax error at {where}: {error.msg}", "Mend this line.")]
    bound = _bound_names(tree)
    if function not in bound and "*" not in bound:
        guess = nearest(function, list(bound))
        listed = ", ".join(sorted(bound)) or "nothing"
        fix = f"Did you mean `{guess}`?" if guess else f"The file defines {listed}."
        return [Problem(path, function, "is not defined in this file", fix)]
    typed = not bound.keys().isdisjoint({"REWARD_TYPE", "*"})
    given = set(parameters)
    found = [_problems(node, path, columns, given, typed) for node in bound.get(function, ())]
    # Which of several definitions stands is known when the file runs: one that fits will do.
    return min(found, key=len, default=[])


def _bound_names(tree: ast.Module) -> dict[str, list[ast.AST]]:
    """What the module's own statements bind, those below `if` and `try` too; `*` for a star."""
    names: dict[str, list[ast.AST]] = {}
    pending: list[ast.AST] = [tree]
    for node in pending:
        bound: list[str] = []
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                bound = [name]
            case ast.ClassDef(name=name):
                bound = [name]
            case ast.Assign(targets=targets):
                bound = [name for target in targets for name in _targets(target)]
            case ast.AnnAssign(target=target, value=ast.expr()):
                bound = _targets(target)
            case ast.ImportFrom(names=aliases):
                bound = [alias.asname or alias.name for alias in aliases]
            case ast.expr():
                pass
            case _:
                pending.extend(ast.iter_child_nodes(node))
        for name in bound:
            names.setdefault(name, []).append(node)
    return names


def _targets(target: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]


def _problems(
    node: ast.AST,
    path: str,
    columns: Sequence[str] | None,
    parameters: set[str],
    typed: bool,
) -> list[Problem]:
    """Problems of one definition; none where only running it would tell its signature."""
    if not isinstance(node, AnyFunction) or node.decorator_list:
        return []
    positional = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    optional = set(positional[len(positional) - len(node.args.defaults) :])
    names = list(positional)
    for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        names.append(argument.arg)
        if default is not None:
            optional.add(argument.arg)
    free = [name for name in names if name not in parameters]
    required = [name for name in free if name not in optional]
    line = f"line {node.lineno}"
    problems = []
    if node.args.kwarg is None:
        problems += [
            Problem(path, name, f"{line}: `{node.name}` has no parameter `{name}`",
                    f"Remove it from `parameters`, or accept it ({', '.join(names)}).")
            for name in sorted(parameters.difference(names))
        ]  # fmt: skip
    first = free[0] if free else None
    if first != COMPLETIONS:
        if not _is_known(first, required, typed):
            problems.append(Problem(path, node.name, f"{line}: is no reward signature", _FIX))
        return problems
    if columns is None:
        return problems
    known = [*columns, *PROVIDED_COLUMNS]
    for name in required:
        if name not in (COMPLETIONS, *known):
            guess = nearest(name, known)
            listed = f"Columns: {', '.join(columns)}. Given too: {', '.join(PROVIDED_COLUMNS)}."
            fix = f"Did you mean `{guess}`?" if guess else listed
            reason = f"{line}: `{node.name}` needs `{name}`, which is no column"
            problems.append(Problem(path, name, reason, fix))
    return problems


def _is_known(first: str | None, required: Sequence[str], typed: bool) -> bool:
    """A function whose first parameter is not `completions` follows one of the interfaces."""
    if first == INPUTS and list(required) in ([INPUTS], []):
        return True
    if len(required) == 1 and (typed or first in (EASYR1_BATCH, EASYR1_ONE)):
        return True
    return len(required) == 2 and required[0] in PREDICT and required[1] in GROUND_TRUTH


def sibling_modules(name: str, source: str) -> Iterator[str]:
    """Where modules would lie that the file ``name`` imports from its own folder: any but the
    standard library's; none when it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= dict.fromkeys(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found[node.module.partition(".")[0]] = None
    for module in found:
        if module not in sys.stdlib_module_names:
            yield posixpath.join(posixpath.dirname(name), f"{module}.py")
