"""A headless Chromium, where there is one."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
WAIT_SECONDS = 60.0


@contextmanager
def browser(width: int = 1440, height: int = 900, dark: bool = False) -> Iterator[Any]:
    """Start a Chromium with an empty profile, and yield its driver; skip the test where it is not installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (extra: test)")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            yield opened
        finally:
            opened.quit()


def console_messages(driver: Any) -> list[str]:
    """Return the messages of the console."""
    return [entry["message"] for entry in driver.get_log("browser")]


def requests(driver: Any) -> list[str]:
    """Return every requested URL outside the page itself."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    urls = [parameters["request"]["url"] for parameters in sent]
    return [url for url in urls if not url.startswith(("blob:", "data:", "chrome:"))]
