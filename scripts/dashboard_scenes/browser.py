"""Chromium of the system, driven by playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIZES = {"wide": {"width": 1366, "height": 900}, "narrow": {"width": 390, "height": 844}}
SCHEMES = ("light", "dark")
REQUIRED = "LONGPREFILL_REQUIRE_CHROMIUM"
"""Set where the browser has to be there, as in CI: its absence is a failure then."""


def find_chromium() -> str | None:
    """The browser's program; None when this machine has none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


def is_required() -> bool:
    return bool(os.environ.get(REQUIRED))


@contextmanager
def browser(program: str) -> Iterator[Browser]:
    """A headless browser, ended with the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, headless=True, args=list(FLAGS))
        try:
            yield started
        finally:
            started.close()


@contextmanager
def page(browser: Browser, size: str, scheme: str) -> Iterator[Page]:
    """A fresh profile's page of a size and colour scheme, without animations."""
    context = browser.new_context(
        viewport=SIZES[size],  # pyright: ignore[reportArgumentType]
        color_scheme=scheme,  # pyright: ignore[reportArgumentType]
        reduced_motion="reduce",
        device_scale_factor=1,
        locale="en-GB",
    )
    try:
        yield context.new_page()
    finally:
        context.close()


def overflow(page: Page) -> int:
    """Pixels by which the page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
