"""A pipeline schedule to look at: a line for each rank, in the terminal or as an SVG file.

Both are a few strings: no plotting library is needed anywhere else.
"""

from html import escape

from fourfold.planner.schedule import Kind, Simulation, Span

COLOURS = {
    Kind.forward: "#4c78a8",
    Kind.backward: "#f58518",
    Kind.backward_input: "#f58518",
    Kind.backward_weight: "#eeca3b",
}
NAMES = {
    Kind.forward: "forward",
    Kind.backward: "backward",
    Kind.backward_input: "backward, input",
    Kind.backward_weight: "backward, weight",
}
SIDE, HIGH, TOP = 60, 22, 40  # pixels: left margin, a rank's line, above the first


def in_terminal(simulation: Simulation, *, width: int = 100) -> list[str]:
    """`rank 0  F0F1...B0`: the kind of action at each moment, forward passes as digits of their micro-batch, . for idle."""
    scale = width / simulation.makespan
    lines = [["."] * width for _ in simulation.peaks]
    for span in simulation.spans:
        first, last = int(span.start * scale), max(int(span.start * scale) + 1, int(span.end * scale))
        lines[span.rank][first:last] = list(_drawn(span, last - first))
    digits = len(str(len(lines) - 1))
    return [f"rank {rank:>{digits}}  {''.join(line[:width])}" for rank, line in enumerate(lines)]


def as_svg(simulation: Simulation, *, title: str, width: int = 1200) -> str:
    """Widths to scale; a tooltip on each action. Later stages of a rank are darker."""
    scale = (width - SIDE - 10) / simulation.makespan
    stages = sorted({span.action.stage for span in simulation.spans})
    ranks = len(simulation.peaks)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{TOP + HIGH * ranks + 40}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{SIDE}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for rank in range(ranks):
        y = TOP + HIGH * rank
        parts.append(f'<text x="4" y="{y + 15}" font-size="12">rank {rank}</text>')
        parts.append(f'<rect x="{SIDE}" y="{y}" width="{width - SIDE - 10}" height="{HIGH - 4}" fill="#eeeeee"/>')
    parts += [_box(span, scale=scale, dark=span.action.stage / max(1, stages[-1])) for span in simulation.spans]
    kinds = [kind for kind in Kind if any(span.action.kind is kind for span in simulation.spans)]
    for number, kind in enumerate(kinds):
        x, y = SIDE + 160 * number, TOP + HIGH * ranks + 12
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 12}" font-size="12">{NAMES[kind]}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _drawn(span: Span, length: int) -> str:
    mark = (
        f"{span.action.kind}{span.action.micro_batch}"
        if length > len(str(span.action.micro_batch))
        else span.action.kind
    )
    fill = span.action.kind.lower()
    return (mark + fill * length)[:length]


def _box(span: Span, *, scale: float, dark: float) -> str:
    action = span.action
    x, y, wide = SIDE + span.start * scale, TOP + HIGH * span.rank, (span.end - span.start) * scale
    label = f"{NAMES[action.kind]}, stage {action.stage}, micro-batch {action.micro_batch}"
    box = (
        f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{HIGH - 4}" fill="{COLOURS[action.kind]}" '
        f'fill-opacity="{0.6 + 0.4 * dark:.2f}" stroke="white" stroke-width="0.5"><title>{label}</title></rect>'
    )
    if wide < 14:
        return box
    return box + f'<text x="{x + 2:.2f}" y="{y + 13}" font-size="10" fill="white">{action.micro_batch}</text>'
