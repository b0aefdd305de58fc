"""The page of the report. Whatever comes from the run is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import msgspec

from sc_core.seeing.figures import PART_COLOURS
from sc_core.seeing.history import PARTS, History
from sc_core.seeing.lives import Life
from sc_core.seeing.words import decimals, duration, escaped, mean, percent, plural, when

_MOST_WINDOWS = 1000  #: rows of the table
_SECTIONS = {
    "learning": "Reward and loss",
    "stale": "Staleness",
    "buffer": "Buffer",
    "time": "Time",
    "checkpoints": "Checkpoints",
    "dropped": "Drops",
    "lives": "Restarts",
    "engines": "Engines",
}
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


def page(history: History, figures: Mapping[str, Any], plotly_js: str, *, made: float) -> str:
    """The whole document; `made` is the unix time of now."""
    lives = history.lives
    title = escaped(f"{lives.name}: {outcome(history)}")
    sections = {**_SECTIONS, "learning": _learning(figures)}
    links = " ".join(f'<a href="#{name}">{said}</a>' for name, said in sections.items())
    body = "\n".join(
        [
            _header(history),
            _verdict(history),
            _tiles(history),
            f"<nav>{links}</nav>",
            *_sections(history, figures),
            f"<footer>Made {when(made)} from the event log, metrics and spans of"
            f" {escaped(lives.run)}.</footer>",
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n<style>\n{_file('page.css')}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n"
        f'<script type="application/json" id="figures">{_embedded(figures)}</script>\n'
        f"<script>{plotly_js}</script>\n<script>\n{_file('page.js')}</script>\n</body>\n</html>\n"
    )


def _file(name: str) -> str:
    return files("sc_core.seeing").joinpath(name).read_text("utf-8")


def _embedded(value: object) -> str:
    """JSON that no script tag ends in."""
    text = msgspec.json.encode(value).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


# the top -------------------------------------------------------------------------------


def outcome(history: History) -> str:
    """How the run ended, or that it did not, in a few words."""
    end = history.lives.last.end
    if end is None:
        return "running, or killed: its log has no end"
    category, _, more = end.partition(":")
    return {
        "max_steps": "done, all steps made",
        "exhausted": "done, out of prompts",
        "stopped": f"stopped on request ({more.strip()})" if more else "stopped on request",
        "must_save_by": "stopped, its time was up",
        "failed": f"failed: {more.strip()}",
    }.get(category, end)


def _header(history: History) -> str:
    lives = history.lives
    took = duration(lives.ended - lives.began)
    return (
        f"<header><h1>{escaped(lives.name)}</h1>"
        f'<p><span class="outcome">{escaped(_capital(outcome(history)))}</span>'
        f" · began {when(lives.began)} · {took} to its last event</p></header>"
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _verdict(history: History) -> str:
    report = history.audit
    if report.ok:
        said = (
            f"<b>Every prompt is accounted for.</b> {plural(report.prompts, 'prompt')} left the"
            f" source: {report.trained:,} trained, {sum(report.dropped.values()):,} dropped for a"
            f" recorded reason and {sum(report.pending.values()):,} still pending, each exactly"
            " once."
        )
        if report.pending and history.lives.last.end is not None:
            said += (
                " Those pending had gone out ahead of training; they go on if the run is resumed."
            )
    else:
        first = report.violations[0] if report.violations else ""
        said = (
            f"<b>The log contradicts itself:</b> {plural(report.violation_count, 'violation')},"
            f" the first: {escaped(first)}."
        )
    kind = "" if report.ok else " bad"
    if report.names_servers:
        said += f" {escaped(_capital(report.served))}."
    return f'<p class="verdict{kind}" id="audit">{said}</p>'


def _tiles(history: History) -> str:
    report, lives = history.audit, history.lives
    first, last = mean(history.first_rewards), mean(history.last_rewards)
    ends = len(history.last_rewards)
    undone = sum(life.steps_undone for life in lives.all.values())
    stale = history.staleness_mean
    waited = history.commit_wait_s if history.metric_rows else None
    longest = max((w.commit_wait_s or 0.0 for w in history.windows), default=0.0)
    tiles = [
        ("Steps", f"{history.steps:,}", _undone(undone, len(history.restarts))),
        (
            "Mean reward",
            f"{decimals(first)} → {decimals(last)}",
            f"first and last {plural(ends, 'step')}" if ends else "no metrics yet",
        ),
        ("Prompts trained", f"{report.trained:,}", f"of {report.prompts:,}"),
        ("Dropped", f"{sum(report.dropped.values()):,}", _kinds(len(report.dropped))),
        ("Pending", f"{sum(report.pending.values()):,}", _pending(report.pending)),
        ("Restarts", f"{len(history.restarts):,}", ""),
        ("Mean staleness", decimals(stale, 2), "weight versions"),
        (
            "Commits waited",
            duration(waited),
            f"in all, {duration(longest)} at most" if longest else "for checkpoints, in all",
        ),
    ]
    return (
        '<dl class="tiles">'
        + "".join(
            f'<div class="tile"><dt>{name}</dt><dd>{value}'
            f"{f'<small>{more}</small>' if more else ''}</dd></div>"
            for name, value, more in tiles
        )
        + "</dl>"
    )


def _undone(steps: int, restarts: int) -> str:
    by = "a restart" if restarts == 1 else "restarts"
    return f"{steps:,} more undone by {by}" if steps else ""


def _kinds(count: int) -> str:
    return f"for {plural(count, 'reason')}" if count else ""


def _pending(states: Mapping[str, int]) -> str:
    return escaped(", ".join(f"{n:,} {state.replace('_', ' ')}" for state, n in states.items()))


# the sections --------------------------------------------------------------------------


def _sections(history: History, figures: Mapping[str, Any]) -> Iterable[str]:
    def figure(name: str, about: str) -> str:
        if name not in figures:
            return ""
        place = f'<div class="figure" id="{name}" role="img" aria-label="{about}"></div>'
        return f'<div class="card">{place}</div>'

    def section(name: str, how: str, *parts: str, empty: str = "") -> str:
        content = "".join(parts) or f'<p class="none">{empty}</p>'
        return f'<section id="{name}"><h2>{titles[name]}</h2><p>{how}</p>{content}</section>'

    def pair(*parts: str) -> str:
        return f'<div class="pair">{"".join(parts)}</div>' if all(parts) else "".join(parts)

    no_metrics = "There are no metrics yet: the first step is not finished."
    titles = {**_TITLES, "learning": _learning(figures)}
    yield section(
        "learning",
        _learning_how(history, figures),
        pair(figure("reward", "mean reward by step"), figure("loss", "loss by step")),
        empty="The metrics have no reward and no loss." if history.metric_rows else no_metrics,
    )
    yield section(
        "stale",
        "How many weight versions lay between the weights that began a group and those that"
        " learned from it: more is faster, and further off-policy.",
        pair(
            figure("staleness", "histogram of staleness"),
            figure("lag", "staleness by step"),
        ),
        empty="No group has been trained yet.",
    )
    yield section(
        "buffer",
        "A group holds a place from its dispatch until it is trained or dropped. Many ready groups"
        " mean that training is the bottleneck, many in flight that generation is."
        + (
            " Time is that of the lives of the run, without what lay between them; a dotted line"
            " marks each restart."
            if history.restarts
            else ""
        ),
        figure("levels", "places held, groups ready and in flight over time"),
        empty="Nothing has happened yet.",
    )
    yield section(
        "time",
        "What the train pump did in each step. Waiting for groups is time that faster generation,"
        " or more staleness, would save.",
        figure("parts", "where the time of each step goes"),
        _parts_table(history),
        empty=no_metrics,
    )
    yield section(
        "checkpoints",
        "To save, a checkpoint waits until no commit is half done, then holds the barrier alone"
        " while the data plane writes its snapshot. Only commits wait; generation goes on."
        " <i>Saved</i> is from the first file to the hand-over: hashing and publishing follow,"
        " beside training.",
        figure("windows", "waits and holds of each window"),
        _windows_table(history),
        empty="No checkpoint has been taken yet.",
    )
    yield section(
        "dropped",
        "Prompts that were given up, by reason. Each is in the log with its ordinal.",
        _drops_table(history),
        empty="No prompt was dropped.",
    )
    yield section(
        "lives",
        "Each process life of the run. What one did after the checkpoint that the next went on from"
        " is undone: those prompts were trained again, or are pending.",
        _lives_table(history),
    )
    yield section(
        "engines",
        _capital(history.audit.served) + ". Groups are those with a sibling from the engine."
        if history.audit.names_servers
        else "Which engine generated how many groups, where groups name their engines.",
        _engines_table(history) if history.audit.names_servers else "",
        empty="No group of this run names the engines that generated it.",
    )


_TITLES = {
    **_SECTIONS,
    "buffer": "Buffer and groups in flight",
    "time": "Where a step's time goes",
    "checkpoints": "Checkpoint windows",
    "dropped": "Dropped prompts",
    "lives": "Lives and restarts",
}


def _learning(figures: Mapping[str, Any]) -> str:
    shown = [name for name in ("reward", "loss") if name in figures]
    return _capital(" and ".join(shown)) or _SECTIONS["learning"]


def _learning_how(history: History, figures: Mapping[str, Any]) -> str:
    """How to read the curves that are there."""
    said = []
    if "reward" in figures:
        said.append(
            "Up and to the right is what you want of reward; the thick line is the mean of ten"
            " points."
        )
    elif "loss" in figures:
        said.append("The loss of each step, as the trainer reports it.")
    else:
        said.append("What the trainer reports of each step.")
    if history.restarts:
        said.append("A dotted line marks each restart, at the step it went on from.")
    each = max(history.curves.reward.each, history.curves.loss.each)
    if each > 1:
        said.append(f"Each point is the mean of {each} steps.")
    return " ".join(said)


def _table(name: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML. A column whose head begins with `<` is text, else numbers."""
    if not rows:
        return ""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{_kind(title, tag)}>{cell}</{tag}>"
            for title, cell in zip(head, row, strict=True)
        )

    titles = cells("th", [title.strip("<.") for title in head])
    lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table id="{name}"><thead><tr>{titles}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _kind(title: str, tag: str) -> str:
    if title.startswith("<."):
        return ' class="text long"' if tag == "td" else ' class="text"'
    return ' class="text"' if title.startswith("<") else ""


def _parts_table(history: History) -> str:
    steps = len(history.curves.parts["rest"]) and history.steps
    whole = sum(history.seconds.values())
    if not steps or not whole:
        return ""
    rows = [
        [
            f'<span class="swatch" style="background:var(--{colour})"></span>{said}',
            duration(history.seconds[name] / steps),
            percent(history.seconds[name], whole),
            duration(history.seconds[name]),
        ]
        for (name, said), colour in zip(PARTS.items(), PART_COLOURS, strict=True)
    ]
    rows.append(["a step", duration(whole / steps), "", duration(whole)])
    return _table("parts-table", ["<part", "per step", "share", "in all"], rows)


def _windows_table(history: History) -> str:
    windows = history.windows[-_MOST_WINDOWS:]
    numbers = {life.incarnation: life for life in history.lives.all.values()}
    rows = []
    for window in windows:
        life = numbers.get(window.incarnation)
        kept = "published" if window.published else "never published"
        if life is not None and window.published and window.step > life.until_step:
            kept = "published, then passed over"
        rows.append(
            [
                f"{window.step:,}",
                duration(window.waited_s),
                duration(window.held_s),
                duration(window.snapshot_s),
                duration(window.total_s),
                duration(window.commit_wait_s),
                f"{window.commits:,}" if window.commit_wait_s is not None else "–",
                "–" if life is None else str(life.number),
                kept,
            ]
        )
    head = [
        "after step",
        "waited",
        "held",
        "of it snapshot",
        "saved",
        "longest commit wait",
        "commits that waited",
        "life",
        "<bundle",
    ]
    left = len(history.windows) - len(windows)
    more = f'<p class="none">{plural(left, "earlier window")} left out.</p>' if left else ""
    return _table("windows-table", head, rows) + more


def _drops_table(history: History) -> str:
    whole = sum(drop.count for drop in history.drops.values())
    rows = [
        [
            escaped(reason or "no reason"),
            f"{drop.count:,}",
            percent(drop.count, whole),
            f"{drop.first_step:,} – {drop.last_step:,}",
            "".join(f"<div>{escaped(example)}</div>" for example in drop.examples),
        ]
        for reason, drop in history.drops.items()
    ]
    return _table("drops-table", ["<reason", "prompts", "share", "after steps", "<.such as"], rows)


def _lives_table(history: History) -> str:
    def row(life: Life) -> list[str]:
        is_last = life is history.lives.last
        end = life.end or ("running, or killed" if is_last else "killed")
        began = "a fresh start" if life.parent is None else f"resumed from step {life.from_step:,}"
        undone = f"{life.steps_undone:,}" if life.steps_undone else "0"
        return [
            str(life.number),
            when(life.began),
            began,
            f"{life.last_step - life.from_step:,}",
            undone,
            duration(life.ended - life.began),
            escaped(end),
            f"<code>{escaped(life.incarnation)}</code>",
        ]

    head = ["life", "<began", "<with", "steps", "undone", "lasted", "<.ended", "<incarnation"]
    return _table("lives-table", head, [row(life) for life in history.lives.all.values()])


def _engines_table(history: History) -> str:
    rows = [
        [
            escaped(name),
            f"{engine.groups:,}",
            f"{engine.confirmed:,}",
            f"{engine.joined:,}",
            f"{engine.unconfirmed:,}",
        ]
        for name, engine in history.audit.engines.items()
    ]
    head = ["<engine", "groups", "versions confirmed", "of them on joining", "served unconfirmed"]
    return _table("engines-table", head, rows)
