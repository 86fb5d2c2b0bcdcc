"""The page of the command line, from the commands themselves."""

from __future__ import annotations

import typer.main

from fedssl.cli import app


def page() -> str:
    """Markdown: a section for each command with its usage, its help, and its arguments and options.

    Raises:
        ValueError: a command or an option has no help.
    """
    group = typer.main.get_command(app)
    return "\n\n".join(_command(name, command) for name, command in group.commands.items())


def _command(name, command) -> str:
    if not command.help:
        raise ValueError(f"the command {name} has no help; give its function a docstring")
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    usage = " ".join(
        ["fedssl", name, *(_usage(argument) for argument in arguments), *(["[OPTIONS]"] if options else [])]
    )
    lines = [f"## fedssl {name}", f"```text\n{usage}\n```", command.help.replace("\b\n", "")]
    rows = []
    for parameter in (*arguments, *options):
        if not parameter.help:
            raise ValueError(f"{parameter.name} of fedssl {name} has no help")
        rows.append(f"| {_name(parameter)} | {_cell(parameter.help)} | {_default(parameter)} |")
    if rows:
        lines.append("\n".join(["| argument or option | what it means | default |", "|---|---|---|", *rows]))
    return "\n\n".join(lines)


def _usage(argument) -> str:
    word = argument.metavar or argument.name.upper()
    word = word.strip("[]").rstrip(".")
    word = f"{word}..." if argument.nargs != 1 else word
    return word if argument.required else f"[{word}]"


def _name(parameter) -> str:
    if parameter.param_type_name == "argument":
        return f"`{_usage(parameter)}`"
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.type.name.upper()}"
    return ", ".join(f"`{option}{value}`" for option in (*parameter.opts, *parameter.secondary_opts))


def _default(parameter) -> str:
    if parameter.required:
        return "must be given"
    default = parameter.default
    if default is None or default is False or callable(default) or default in ((), []):
        return ""
    return f"`{default}`"


def _cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
