"""The command ``lengths``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli import options as opt
from autopar.cli.json_output import print_json
from autopar.cli.outputs import check_files, write


def lengths(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="as --data of autopar train: text (a byte is a token) or arrays of tokens (.npy, .bin): a file, a "
            "folder or a pattern; stdlib for the source of Python's standard library",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="write the histogram here, for --lengths")
    ] = None,
    end_of_document: Annotated[
        int | None,
        typer.Option("--end-of-document", metavar="TOKEN", help="that ends a document; without it a file is one"),
    ] = None,
    token_dtype: Annotated[str, typer.Option("--token-dtype", help="of .bin files: uint8 to int64")] = "uint16",
    json: opt.Json = False,
) -> None:
    """Measure how long the documents of a dataset are, in tokens."""
    from autopar.data.corpus import open_corpus
    from autopar.data.lengths import document_lengths
    from autopar.ir.lengths import LengthHistogram
    from autopar.report.lengths import described, print_lengths

    check_files(output)
    found = document_lengths(open_corpus(data, token_dtype), end_of_document)
    histogram, figures = LengthHistogram.of(found), described(found)
    if output is not None:
        write(output, histogram.save)
    if json:
        print_json({**figures, "histogram": histogram.model_dump(mode="json")})
        return
    print_lengths(figures, found)
    if output is not None:
        typer.echo(f"histogram written to {output}")
