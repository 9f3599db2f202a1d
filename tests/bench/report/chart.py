"""Charts as SVG text: groups of bars, and lines over two logarithmic axes.

Invariant: the same numbers give the same bytes; nothing but this file is needed to draw them.
"""

import math
from xml.sax.saxutils import escape

COLORS = ["#1f5fa8", "#8ab4e0", "#c4622d", "#7a7a7a", "#3d8f5f", "#a04a8f"]
WIDTH, LEFT, RIGHT, TOP, ROW = 900, 270, 60, 66, 15


def _text(x, y, text, anchor="start", size=12, weight="normal"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}">{escape(text)}</text>'


def _line(x1, y1, x2, y2, color="#ddd", width=1, dash=""):
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"{dashes}/>'


def _document(height, title, series, parts):
    keys, x = [], 14
    for number, name in enumerate(series):
        keys += [f'<rect x="{x}" y="34" width="12" height="12" fill="{COLORS[number]}"/>', _text(x + 17, 44, name)]
        x += 40 + 7 * len(name)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    back = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    return "\n".join([head, back, _text(14, 22, title, size=15, weight="bold"), *keys, *parts, "</svg>"]) + "\n"


def bars(title, groups, series, unit, top=None):
    """`groups`: [(label, [a value or None for each of `series`])], drawn from left to right, one below the other."""
    top = top or max(value for _, values in groups for value in values if value is not None)
    scale, parts, y = (WIDTH - LEFT - RIGHT) / top, [], TOP
    for label, values in groups:
        parts.append(_text(LEFT - 8, y + ROW * len(series) / 2 + 4, label, "end"))
        for number, value in enumerate(values):
            if value is not None:
                parts.append(f'<rect x="{LEFT}" y="{y + 1}" width="{value * scale:.1f}" height="{ROW - 2}" fill="{COLORS[number]}"/>')
                parts.append(_text(LEFT + value * scale + 4, y + ROW - 4, f"{value:.0f}{unit}", size=10))
            y += ROW
        y += 10
    parts.append(_line(LEFT, TOP - 6, LEFT, y - 4, "#444"))
    return _document(y + 10, title, series, parts)


def lines(title, series, x_name, y_name, height=460):
    """`series`: {name: [(x, y)]}, logarithmic in both; a name that begins with "floor" is dashed."""
    points = [point for line in series.values() for point in line]
    x_low, x_high = (pick(math.log2(x) for x, _ in points) for pick in (min, max))
    y_low, y_high = (math.floor(min(math.log10(y) for _, y in points)), math.ceil(max(math.log10(y) for _, y in points)))
    bottom, left, right = height - 50, 80, WIDTH - 30
    at_x = lambda x: left + (math.log2(x) - x_low) / max(x_high - x_low, 1e-9) * (right - left)
    at_y = lambda y: bottom - (math.log10(y) - y_low) / max(y_high - y_low, 1e-9) * (bottom - TOP)
    parts = [_text((left + right) / 2, height - 10, x_name, "middle"), _text(14, TOP - 4, y_name, size=11)]
    for x in sorted({x for x, _ in points}):
        parts += [_line(at_x(x), TOP, at_x(x), bottom), _text(at_x(x), bottom + 18, f"{x // 1024}K" if x < 1 << 20 else f"{x >> 20}M", "middle", 11)]
    for power in range(y_low, y_high + 1):
        parts += [_line(left, at_y(10.0**power), right, at_y(10.0**power)), _text(left - 6, at_y(10.0**power) + 4, f"{10**power:g}", "end", 11)]
    for number, (name, line) in enumerate(series.items()):
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in sorted(line))
        dash = ' stroke-dasharray="5 4"' if name.startswith("floor") else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLORS[number]}" stroke-width="2"{dash}/>')
        parts += [f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="3" fill="{COLORS[number]}"/>' for x, y in line]
    return _document(height, title, list(series), parts)
