"""The survey's page as people see it: in a browser, in light and dark, wide and narrow."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import Watched, a_browser, needs_browser, serious_findings
from survey_files import a_survey, machine

from syncline.lab.survey.merge import merge
from syncline.lab.survey.page import as_html
from syncline.lab.survey.survey_file import SurveyFile

pytestmark = needs_browser


def written(folder: Path, survey: SurveyFile) -> str:
    page = folder / "survey.html"
    page.write_text(as_html(survey))
    return page.as_uri()


@pytest.mark.parametrize(("width", "scheme"), [("wide", "light"), ("narrow", "dark")])
def test_the_page_asks_the_network_for_nothing_fits_the_screen_and_is_accessible(tmp_path, width, scheme):
    both = merge([a_survey(), a_survey(on=machine(64))])
    with a_browser() as browser:
        seen = Watched(browser, width=width, scheme=scheme)
        address = written(tmp_path, both)
        seen.page.goto(address)
        assert seen.requests == [address]
        assert seen.complaints == []
        assert not seen.is_wider_than_the_screen()
        assert serious_findings(seen.page) == []
        background = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) > 384) is (scheme == "light")


def test_a_table_is_sorted_by_a_column_and_gaps_stay_at_the_end(tmp_path):
    with a_browser() as browser:
        page = Watched(browser).page
        page.goto(written(tmp_path, a_survey()))
        table = page.locator("#figure-4 table.sortable")
        rows = table.locator("tbody th")
        head = table.locator("thead button", has_text="batch 16")
        head.click()
        assert rows.all_inner_texts() == ["The ddp", "The syncline-train"]
        head.click()
        assert rows.all_inner_texts() == ["The syncline-train", "The ddp"]
        assert table.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
        table.locator("thead button", has_text="batch 256").click()  # not measured for one of them
        assert rows.all_inner_texts() == ["The ddp", "The syncline-train"]
        table.locator("thead button", has_text="batch 256").click()
        assert rows.all_inner_texts() == ["The ddp", "The syncline-train"]


def test_gaps_say_why_and_rankings_say_what_is_shown(tmp_path):
    with a_browser() as browser:
        page = Watched(browser, scripts=False).page
        page.goto(written(tmp_path, a_survey()))
        told = page.locator("#figure-4").inner_text()
        assert "not measurable here, because it was" in told
        assert "batch 16: The syncline-train is ahead of The ddp." in told
