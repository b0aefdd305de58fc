"""The curves of the report, as plotly's JSON. Colours are names that the page resolves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sc_core.seeing.history import PARTS, History
from sc_core.seeing.thinned import Thinned

Json = dict[str, Any]
_SMOOTH = 10  #: points that the thick curve is the mean of
_LABELLED = 8  #: restarts that have a word beside their line
_UNITS = ((7200.0, 3600.0, "hours"), (180.0, 60.0, "minutes"))
PART_COLOURS = ("c2", "c4", "c7", "c1", "c3", "muted")  #: of `PARTS`


def figures(history: History) -> dict[str, Json]:
    """By the id of their place in the page; those without a point are left out."""
    made = {
        "reward": _reward(history),
        "loss": _loss(history),
        "staleness": _staleness(history),
        "lag": _lag(history),
        "levels": _levels(history),
        "parts": _parts(history),
        "windows": _windows(history),
    }
    return {name: figure for name, figure in made.items() if figure is not None}


def _figure(data: list[Json], x: str, y: str, **layout: Any) -> Json:
    return {"data": data, "layout": {"xaxis": {"title": x}, "yaxis": {"title": y}, **layout}}


def _line(curve: Thinned, name: str, colour: str, *, digits: int = 4, **more: Any) -> Json:
    line = {"color": colour, "width": more.pop("width", 1.5), **more.pop("line", {})}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": _rounded(curve.x, 3),
        "y": _rounded(curve.y, digits),
        "line": line,
        **more,
    }


def _rounded(numbers: Sequence[float | None], digits: int) -> list[float | None]:
    return [None if number is None else round(number, digits) for number in numbers]


def _smooth(curve: Thinned) -> list[float]:
    """The mean of each point and some before it."""
    values = [value for value in curve.y if value is not None]
    windows = (values[max(0, at - _SMOOTH + 1) : at + 1] for at in range(len(values)))
    return [round(sum(window) / len(window), 5) for window in windows]


def _restarts(history: History, at: Sequence[float]) -> Json:
    """Vertical lines, one for each restart."""
    labelled = len(at) <= _LABELLED
    return {
        "shapes": [
            {
                "type": "line",
                "xref": "x",
                "yref": "paper",
                "x0": x,
                "x1": x,
                "y0": 0,
                "y1": 1,
                "name": "restart",
                "line": {"color": "c5", "width": 1, "dash": "dot"},
            }
            for x in at
        ],
        "annotations": [
            {
                "x": x,
                "y": 1,
                "xref": "x",
                "yref": "paper",
                "yanchor": "bottom",
                "text": "restart",
                "showarrow": False,
                "font": {"size": 11, "color": "c5"},
            }
            for x in (at if labelled else ())
        ],
    }


def _restart_steps(history: History) -> list[float]:
    return [life.from_step for life in history.restarts]


def _reward(history: History) -> Json | None:
    curve = history.curves.reward
    if not len(curve):
        return None
    thick = {"color": "c1", "width": 2.5}
    data = [
        _line(curve, "each step", "c1", width=1, opacity=0.35, hoverinfo="skip"),
        {**_line(curve, f"mean of {_SMOOTH}", "c1"), "y": _smooth(curve), "line": thick},
    ]
    again, val = history.curves.reward_again, history.curves.val_reward
    if len(again):
        mark = {"color": "c5", "symbol": "circle-open", "size": 5}
        name = "undone by a restart"
        data.append({**_line(again, name, "muted"), "mode": "markers", "marker": mark})
    if len(val):
        mark = {"color": "c2", "size": 8, "symbol": "diamond"}
        name = "held-out prompts"
        line = {"color": "c2", "width": 1, "dash": "dot"}
        data.append(
            {**_line(val, name, "c2"), "mode": "lines+markers", "marker": mark, "line": line}
        )
    return _figure(data, "step", "mean reward", **_restarts(history, _restart_steps(history)))


def _loss(history: History) -> Json | None:
    curve = history.curves.loss
    if not len(curve):
        return None
    data = [_line(curve, "loss", "c4", digits=6)]
    layout = _restarts(history, _restart_steps(history))
    return _figure(data, "step", "loss", showlegend=False, **layout)


def _staleness(history: History) -> Json | None:
    lags = sorted(history.staleness.items())
    if not lags:
        return None
    whole = history.staleness.total()
    bars = {
        "type": "bar",
        "x": [lag for lag, _ in lags],
        "y": [count for _, count in lags],
        "text": [f"{100 * count / whole:.1f}%" for _, count in lags],
        "textposition": "auto",
        "marker": {"color": "c3"},
        "hovertemplate": "%{x} versions behind: %{y} groups<extra></extra>",
    }
    figure = _figure([bars], "versions behind", "trained groups", showlegend=False)
    if len(lags) <= 20:
        figure["layout"]["xaxis"]["dtick"] = 1
    return figure


def _lag(history: History) -> Json | None:
    curves = history.curves
    if not len(curves.staleness_mean):
        return None
    data = [
        _line(curves.staleness_max, "oldest group", "muted", line={"shape": "hv"}, width=1),
        _line(curves.staleness_mean, "mean", "c3", width=2),
    ]
    layout = _restarts(history, _restart_steps(history))
    return _figure(data, "step", "versions behind", **layout)


def _levels(history: History) -> Json | None:
    levels = history.levels
    if not len(levels.places):
        return None
    spent = history.lives.lived_s
    unit_s, unit = next(
        ((u, name) for least, u, name in _UNITS if spent >= least), (1.0, "seconds")
    )
    data = []
    for curve, name, colour, fill in (
        (levels.places, "places held", "c6", "tozeroy"),
        (levels.ready, "groups ready", "c3", "none"),
        (levels.in_flight, "groups in flight", "c1", "none"),
    ):
        one = _line(curve, name, colour, digits=2, fill=fill)
        one["x"] = [round(x / unit_s, 4) for x in curve.x]
        data.append(_down_to_zero(one) if fill != "none" else one)
    places = history.lives.last.places
    if places is not None:
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "all places",
                "x": [0, round(spent / unit_s, 4)],
                "y": [places, places],
                "line": {"color": "muted", "width": 1, "dash": "dash"},
            }
        )
    at = [life.after_s / unit_s for life in history.restarts]
    return _figure(data, f"{unit} of running", "groups", **_restarts(history, at))


def _down_to_zero(line: Json) -> Json:
    """Plotly fills below a line across its breaks: there, have it go down and up again."""
    x: list[float] = []
    y: list[float] = []
    for at, value in enumerate(line["y"]):
        if value is not None:
            x.append(line["x"][at])
            y.append(value)
        else:
            x += line["x"][at : at + 2]
            y += [0.0] * len(line["x"][at : at + 2])
    return {**line, "x": x, "y": y}


def _parts(history: History) -> Json | None:
    parts = history.curves.parts
    if not any(len(curve) for curve in parts.values()):
        return None
    data = [
        _line(parts[name], said, colour, digits=5, width=0.5, stackgroup="step", fillcolor=colour)
        for (name, said), colour in zip(PARTS.items(), PART_COLOURS, strict=True)
    ]
    layout = _restarts(history, _restart_steps(history))
    return _figure(data, "step", "seconds", hovermode="x unified", showlegend=False, **layout)


def _windows(history: History) -> Json | None:
    known = [window for window in history.windows if window.held_s is not None]
    if not known:
        return None
    number = [f"{at}" for at, _ in enumerate(known, 1)]
    data = [
        {
            "type": "bar",
            "name": name,
            "x": number,
            "y": [round(1000 * (getattr(window, field) or 0.0), 3) for window in known],
            "customdata": [window.step for window in known],
            "marker": {"color": colour},
            "hovertemplate": "after step %{customdata}: %{y} ms<extra>" + name + "</extra>",
        }
        for field, name, colour in (
            ("waited_s", "waited for the barrier", "c2"),
            ("held_s", "held it alone", "c1"),
            ("commit_wait_s", "longest commit wait", "c5"),
        )
    ]
    return _figure(data, "window", "milliseconds", barmode="group")
