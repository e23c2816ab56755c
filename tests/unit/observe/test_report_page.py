"""The report's page, from scripted runs, without a browser."""

from __future__ import annotations

import re
import struct
import zlib

import pytest
from report_runs import PREDICTIONS, nobody, plan, started, whole_run, write_run
from typer.testing import CliRunner

from syncline.cli.main import app
from syncline.observe.report.confusion import as_png, confusion, shade, worst_pairs
from syncline.observe.report.load import load
from syncline.observe.report.report_page import as_html
from syncline.telemetry.events import FatalFailure, MetricsLogged, RunEnded
from syncline.telemetry.predictions import Pair, Picture, read_predictions

NASTY = "<script>alert('x')</script> & \"quotes\""


def page_of(*runs) -> str:
    return as_html(load(list(runs), nobody))


def test_a_page_holds_every_part_of_the_report(tmp_path):
    page = page_of(write_run(tmp_path / "run", whole_run()))
    for part in ("figures", "curves", "throughput", "phases", "confusion-run", "workers", "timeline-run", "plan-run"):
        assert f'<section id="{part}"' in page
    assert "97.00%" in page  # test/accuracy, as the summary has it
    assert "worker 1" in page
    assert "3 epochs of 1,000 samples" in page
    assert "210 MB" in page


def test_a_curve_has_all_its_points_on_every_axis(tmp_path):
    page = page_of(write_run(tmp_path / "run", whole_run()))
    figure = page.partition('data-chart="loss"')[2].partition("</figure>")[0]
    for axis in ("step", "epoch", "time"):
        plot = figure.partition(f'class="by by-{axis}"')[2].partition('<div class="by')[0]
        drawn = dict(re.findall(r'd="M([^"]*)" data-label="(\w+)"', plot))
        points = {name: len(path.split("L")) for path, name in drawn.items()}
        assert points == {"train": 30, "test": 3}


def test_long_runs_are_thinned(tmp_path):
    page = page_of(write_run(tmp_path / "run", whole_run(2000)))
    figure = page.partition('data-chart="loss"')[2].partition("</figure>")[0]
    assert max(len(path.split("L")) for path in re.findall(r'd="M([^"]*)" data-label', figure)) == 400


def test_runs_without_steps_or_events_have_a_page_too(tmp_path):
    assert "no events yet" in page_of(write_run(tmp_path / "empty", [], predictions=None))
    starting = page_of(write_run(tmp_path / "starting", [started()], predictions=None))
    assert "no worker has completed a step" in starting


def test_a_loop_of_ones_own_is_drawn_over_steps_and_time_only(tmp_path):
    events = [started(kind="own-loop", train_samples=0, total_steps=0, steps_per_epoch=0)]
    events += [
        MetricsLogged(time=events[0].time + s, worker_id=0, step=s, metrics={"loss": 1 / s, "bleu": s / 9})
        for s in (1, 2, 3)
    ]
    page = page_of(write_run(tmp_path / "run", events, predictions=None))
    assert 'data-chart="bleu"' in page
    assert 'id="axis-step"' in page
    assert 'id="axis-epoch"' not in page


def test_why_a_run_failed_comes_first_and_nothing_it_says_becomes_part_of_the_page(tmp_path):
    failed = [FatalFailure(worker_id=1, message=NASTY), RunEnded(reason="failed", message=NASTY)]
    page = page_of(write_run(tmp_path / "run", [*whole_run(5, ends=False), *failed]))
    assert page.index('class="cause"') < page.index('id="curves"')
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_a_plan_of_another_version_is_shown_as_what_it_is(tmp_path):
    events = whole_run()
    events[0] = started(unknown_setting="new", batch_norm="invented")
    assert "unknown_setting" in page_of(write_run(tmp_path / "run", events))


def test_several_runs_are_compared_with_what_differs_between_them_and_the_best_is_marked(tmp_path):
    a = write_run(tmp_path / "a", whole_run())
    b = write_run(tmp_path / "b", [started(strategy="gossip", batch=50), *whole_run()[1:-1]])
    page = page_of(a, b)
    table = page.partition('id="comparison"')[2].partition("</table>")[0]
    assert 'scope="col">strategy' in table
    assert 'scope="col">batch' in table
    assert 'scope="col">seed' not in table
    assert table.count('class="best"') == 3  # accuracy and the losses
    assert 'data-label="a"' in page
    assert 'data-label="b, training"' in page


def test_the_matrix_has_the_counts_by_name_and_the_pictures_are_png():
    told = confusion(PREDICTIONS)
    assert "&lt;owl&gt;" in told
    assert "82.61% of 23 test samples" in told
    assert 'alt="test sample 7, class &lt;owl&gt;, predicted as cat"' in told
    assert "data:image/png;base64," in told


def test_of_many_classes_the_pairs_confused_most_are_listed():
    many = [Pair(i, (i + 1) % 100, i) for i in range(100)]
    assert [p.count for p in worst_pairs(many)[:3]] == [99, 98, 97]
    classes = type(PREDICTIONS)(epoch=1, step=1, classes=100, pairs=many, examples=[])
    told = confusion(classes)
    assert "matrix" not in told
    assert "<li>99 predicted as 0: 99</li>" in told


def test_shades_say_how_much_of_a_class_is_concerned():
    assert shade(0, 10, is_right=False).level == 0
    assert shade(1, 1000, is_right=False).level == 1
    assert shade(100, 1000, is_right=False).level == 5
    assert shade(1000, 1000, is_right=True).level == 5


def test_a_picture_survives_being_made_a_png():
    picture = Picture(2, 3, 3, bytes(range(18)))
    png = as_png(picture)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", png[16:24]) == (2, 3)
    length = struct.unpack(">I", png[33:37])[0]
    rows = zlib.decompress(png[41 : 41 + length])
    assert bytes(b for i, b in enumerate(rows) if i % 7) == picture.pixels


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b'{"epoch":1,"step":1,"classes":1,"pairs":[[0,5,1]],"examples":[]}']
)
def test_predictions_that_make_no_sense_are_left_out(tmp_path, content):
    (tmp_path / "predictions.json").write_bytes(content)
    assert read_predictions(tmp_path / "predictions.json") is None


def test_the_command_writes_the_page_into_the_run_or_to_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", whole_run())
    write_run(tmp_path / "b", whole_run())
    assert CliRunner().invoke(app, ["report", "a"]).exit_code == 0
    assert (tmp_path / "a" / "report.html").is_file()
    assert CliRunner().invoke(app, ["report", "a", "b"]).exit_code == 0
    assert "2 runs compared" in (tmp_path / "report.html").read_text()
    assert CliRunner().invoke(app, ["report", "a", "--out", "there.html"]).exit_code == 0
    assert (tmp_path / "there.html").is_file()


def test_a_plan_that_cannot_be_read_is_named(tmp_path):
    run = write_run(tmp_path / "a", [], predictions=None)
    (run / "plan.json").write_text(str(plan())[:50])
    result = CliRunner().invoke(app, ["report", str(run)])
    assert result.exit_code == 1
    assert "plan.json" in str(result.exception)
