"""`longprefill align`: everything checked first, then the yardstick, our mesh, one table and one last line."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

from longprefill.orchestrator.align.request import STDOUT, AlignRequest, check_request
from longprefill.orchestrator.outputs import check_outputs, writing
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.pieces import check_weights


def align(request: AlignRequest) -> bool:
    """Runs the request; whether all agree. The table goes to standard output, or to standard error where the JSON
    document goes to standard output.

    Raises:
        UserError: something about the request, the model, the prompt or the machine; nothing was started.
        RunFailed: a worker died, hung or failed.
    """
    check_outputs({"--json": None if request.json_file == STDOUT else request.json_file}, inputs=[request.model])
    config = read_config(request.model)
    check_weights(request.model, config)
    settings = check_request(request, config)
    console = Console(stderr=request.json_file == STDOUT)
    # imported here: they load torch
    if request.grid:
        from longprefill.orchestrator.align.grid import walk

        document, line, agrees = walk(request, config, settings, console)
    else:
        from longprefill.orchestrator.align.compare import first_deviation
        from longprefill.orchestrator.align.once import align_once, prompt_of
        from longprefill.orchestrator.align.quantization import effects_document
        from longprefill.orchestrator.align.report import document_of, last_line

        rows, effects = align_once(request, config, settings, prompt_of(request, config), console)
        line, agrees = last_line(rows), first_deviation(rows) is None
        document = {"rows": document_of(rows)}
        if effects:
            document["quantization"] = effects_document(effects)
    _write(
        request, {"agrees": agrees, "last_line": line, "against": request.against, "dtype": request.dtype} | document
    )
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    return agrees


def _write(request: AlignRequest, document: dict[str, Any]) -> None:
    if request.json_file is None:
        return
    text = json.dumps(document, indent=2) + "\n"
    if request.json_file == STDOUT:
        sys.stdout.write(text)
        return
    with writing("--json", request.json_file):
        request.json_file.write_text(text)
