"""Figures of an evaluation as one HTML file that needs no network; only with the ``report`` extra."""

from __future__ import annotations

from pathlib import Path

from autosched.core.atomic_write import write_atomically
from autosched.core.errors import UsageError
from autosched.costmodel.evaluate import Evaluation
from autosched.costmodel.metrics import CurvePoint


def require_plotly() -> None:
    """Find out before an evaluation, too, whether there can be figures of it.

    Raises:
        UsageError: plotly is not installed.
    """
    try:
        import plotly  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "figures need the package plotly, which is not installed; install it with: pip install 'autosched[report]'. "
            "Without -o only tables are made, and with --json what evaluation.json holds."
        ) from error


def write_plots(evaluation: Evaluation, curve: tuple[CurvePoint, ...], path: Path) -> None:
    """Calibration, error by class of pair, importance, and the learning curve.

    Raises:
        UsageError: plotly is not installed.
        OSError: the file cannot be written; what was there before still is.
    """
    require_plotly()
    import plotly.graph_objects as figures
    from plotly.subplots import make_subplots

    titles = ("predicted against measured slowdown", "mean absolute log error by pair class", "permutation importance", "learning curve")
    page = make_subplots(rows=2, cols=2, subplot_titles=titles)
    bins = evaluation.calibration
    sizes = [f"{item.rows} rows" for item in bins]
    predicted, measured = [item.predicted_mean for item in bins], [item.measured_mean for item in bins]
    page.add_trace(figures.Scatter(x=predicted, y=measured, mode="markers+lines", text=sizes, name="mean of bin"), row=1, col=1)
    page.add_trace(figures.Scatter(x=predicted, y=predicted, mode="lines", line={"dash": "dot"}, name="equal"), row=1, col=1)
    # Most slowdowns are near 1, and a few are twenty times that.
    page.update_xaxes(type="log", title_text="predicted slowdown", row=1, col=1)
    page.update_yaxes(type="log", title_text="measured slowdown (dotted: as predicted)", row=1, col=1)
    classes = sorted(evaluation.by_class)
    page.add_trace(figures.Bar(x=classes, y=[evaluation.by_class[name].mean_abs_log for name in classes], name="class"), row=1, col=2)
    top = evaluation.importance[:12]
    page.add_trace(figures.Bar(x=[name for name, _ in top], y=[value for _, value in top], name="importance"), row=2, col=1)
    for model in sorted({point.model for point in curve}):
        points = [point for point in curve if point.model == model]
        x, y = [point.pairs for point in points], [point.metrics.mean_abs_log for point in points]
        page.add_trace(figures.Scatter(x=x, y=y, mode="markers+lines", name=model), row=2, col=2)
    page.update_yaxes(title_text="mean |log error|", row=1, col=2)
    page.update_yaxes(title_text="rise of mean |log error|", row=2, col=1)
    page.update_xaxes(title_text="pairs", row=2, col=2)
    page.update_yaxes(title_text="mean |log error|, held-out rows", row=2, col=2)
    title = f"cost model {evaluation.model}: {evaluation.rows} rows"
    if evaluation.simulated:
        title += f", {evaluation.simulated} of them SIMULATED"
    page.update_layout(title=title, showlegend=False, height=1000)
    write_atomically(path, page.to_html(include_plotlyjs=True, full_html=True).encode())
