"""What a run leaves to read, written into its directory."""

from tessera_cli.distill.evaluation.curves import draw_curve
from tessera_cli.distill.evaluation.html_report import render_html
from tessera_cli.distill.evaluation.model_card import render_card
from tessera_cli.distill.evaluation.provenance import Provenance
from tessera_cli.distill.evaluation.report import Report, render_report
from tessera_cli.distill.evaluation.samples import compare
from tessera_cli.distill.events import Evaluated
from tessera_cli.distill.inputs import RunInputs
from tessera_cli.distill.runs.run_directory import (
    RunDirectory,
    write_bytes,
    write_text,
)
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.loader import load_decoder


def write_report(
    run: RunDirectory, inputs: RunInputs, teacher: Decoder, device: str, *, end: Evaluated
) -> None:
    """Answer held-out prompts with both models; write the reports, the curve and the model card.

    `end` has the figures of the exported weights.
    """
    # From disk and in the teacher's dtype: what the user will serve, at the same terms as the teacher.
    student = load_decoder(run.export, dtype=teacher.head_weight.dtype, device=device)
    comparison = compare(
        teacher,
        student,
        inputs.teacher.tokenizer,
        inputs.eval.documents,
        num_samples=inputs.recipe.eval.samples,
    )
    steps, evaluations = run.metrics()
    report = Report(
        recipe=inputs.recipe,
        teacher=inputs.teacher.config,
        student=student.config,
        layers=run.status.layers or (),
        train_steps=steps,
        evaluations=evaluations,
        end=end,
        comparison=comparison,
        notes=inputs.notes,
        provenance=Provenance.of(run, device),
    )
    card = render_card(
        report,
        teacher_path=inputs.teacher.path,
        is_chat=inputs.teacher.tokenizer.chat_template is not None,
    )
    write_text(run.export / "README.md", card)
    write_bytes(run.path / "curve.png", draw_curve(steps, evaluations))
    write_text(run.path / "report.html", render_html(report))
    write_text(run.path / "report.md", render_report(report))
