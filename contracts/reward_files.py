"""What can be known about a user's reward file without running it.

The control plane never executes user code: it reads the syntax tree, and so a typo is found at
submit time and not after a GPU was paid for.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from contracts.problems import Problem, nearest

__all__ = ["check_reward_file"]

_COMPLETIONS = {"completions", "completion", "predict", "predictions", "reward_input",
                "reward_inputs", "response", "responses", "inputs", "predict_str"}  # fmt: skip
_ALWAYS_GIVEN = {
    "completions", "prompts", "messages", "ground_truth", "response_length", "truncated",
    "ground_truths",
}  # fmt: skip
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
    if function not in bound:
        guess = nearest(function, list(bound))
        listed = ", ".join(sorted(bound)) or "nothing"
        fix = f"Did you mean `{guess}`?" if guess else f"The file defines {listed}."
        return [Problem(path, function, "is not defined in this file", fix)]
    node = bound[function]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return _signature(node, path, columns, set(parameters))
    return []


def _bound_names(tree: ast.Module) -> dict[str, ast.stmt]:
    names: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Assign):
            names.update({t.id: node for t in node.targets if isinstance(t, ast.Name)})
        elif isinstance(node, ast.ImportFrom):
            names.update({alias.asname or alias.name: node for alias in node.names})
    return names


def _signature(
    node: AnyFunction, path: str, columns: Sequence[str] | None, parameters: set[str]
) -> list[Problem]:
    positional = [*node.args.posonlyargs, *node.args.args]
    line = f"line {node.lineno}"
    if not positional and node.args.vararg is None:
        keyword_only = {argument.arg for argument in node.args.kwonlyargs}
        if not keyword_only & _COMPLETIONS:
            return [
                Problem(
                    path,
                    node.name,
                    f"{line}: takes no completions",
                    "Accept the completions as the first parameter.",
                )
            ]
    required = positional[1 : len(positional) - len(node.args.defaults) or None]
    if len(node.args.defaults) >= len(positional):
        required = []
    names = [argument.arg for argument in required]
    names += [
        argument.arg
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if default is None
    ]
    accepted = {argument.arg for argument in (*positional, *node.args.kwonlyargs)}
    problems = []
    if node.args.kwarg is None:
        problems += [
            Problem(path, name, f"{line}: `{node.name}` has no parameter `{name}`",
                    f"Remove it from `parameters`, or accept it ({', '.join(sorted(accepted))}).")
            for name in sorted(parameters - accepted)
        ]  # fmt: skip
    if columns is None:
        return problems
    given = {*columns, *_ALWAYS_GIVEN, *_COMPLETIONS, *parameters}
    for name in names:
        if name not in given:
            guess = nearest(name, list(columns))
            fix = f"Did you mean `{guess}`?" if guess else f"Columns: {', '.join(columns)}."
            problems.append(
                Problem(
                    path, name, f"{line}: `{node.name}` needs `{name}`, which is no column", fix
                )
            )
    return problems
