"""The calculator of the guide shows what the package computes for the same sizes."""

import json
import re
from html import unescape

from ortho import MECHANISMS, cost
from ortho.cost.attention import decoded
from paper.interactive.calculator import LENGTHS, TYPICAL, WIDTHS, calculator, rows


def test_rows_are_the_costs_of_a_layer_the_cheapest_first():
    for use, causal in (("training", True), ("training", False), ("decoding", True)):
        found = rows(use, causal, 2048, 512)
        assert [row.work for row in found] == sorted(row.work for row in found)
        served = {name for name, m in MECHANISMS.items() if (m.causal if causal else m.bidirectional)}
        assert {row.name for row in found} == served
    delta = next(row for row in rows("training", True, 2048, 512) if row.name == "delta")
    layer = cost.layer(1, 2048, 512, 8, attention="delta", causal=True)
    assert (delta.work, delta.memory) == (layer.step / 1e9, layer.saved_bytes / 2**20)
    window = next(row for row in rows("decoding", True, 2048, 512) if row.name == "window")
    assert window.memory == decoded("window", 1, 2048, 8, 64, 64).nbytes / 2**20


def test_the_page_has_every_setting_and_the_table_needs_no_script():
    page = calculator()
    data = json.loads(unescape(re.search(r'data-costs="([^"]*)"', page)[1]))
    assert len(data["costs"]) == 3 * len(LENGTHS) * len(WIDTHS)
    listed = data["costs"]["training true 2048 1024"]
    assert [name for name, *_ in listed] == [row.name for row in rows("training", True, 2048, 1024)]
    for (_, work, memory), row in zip(listed, rows("training", True, 2048, 1024), strict=True):
        # shown with three digits, without decimals from 100 on: a relative error of at most 1/200
        assert abs(work / row.work - 1) <= 0.005
        assert abs(memory / row.memory - 1) <= 0.005
    assert data["mechanisms"]["flash"] == ["softmax", True]
    table = page.partition('<table class="fixed">')[2]
    assert table.count("<code>softmax</code>") == table.count(">100 %<") - table.count("<code>rotary</code>")
    assert table.count("<code>softmax</code>") == len(TYPICAL)
