"""The page, in a browser: text that streams in, chats, and errors that are shown."""

import functools
import itertools
import shutil
import string
import time

import pytest
import test_engine as tiny

pytestmark = pytest.mark.slow
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if not (CHROMIUM and DRIVER):
  pytest.skip("needs a browser: apt-get install chromium chromium-driver", allow_module_level=True)
webdriver = pytest.importorskip("selenium.webdriver", reason="needs the package selenium")

from test_http import TEMPLATE, direct, served  # noqa: E402

from maxlite.inference.batcher import Batcher  # noqa: E402
from maxlite.inference.sampling import Rules  # noqa: E402
from maxlite.inference.server.engine_thread import Worker  # noqa: E402

FLAGS = (
  "--headless",
  "--no-sandbox",  # it does not start as root with one
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
  options = webdriver.ChromeOptions()
  options.binary_location = CHROMIUM
  for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
    options.add_argument(flag)
  driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
  yield driver
  driver.quit()


@pytest.fixture(scope="module")
def worker():
  """One that takes its time, so that text can be seen to come."""
  with pytest.MonkeyPatch.context() as patch:
    step = tiny.two_rows().step
    patch.setattr(tiny.two_rows(), "step", lambda *args: (time.sleep(0.1), step(*args))[1])
    with Worker(Batcher(tiny.two_rows()), queue_size=3).running() as worker:
      yield worker


@pytest.fixture
def page(browser, worker, request):
  """at(id): an element of the page of a model that has the template of the test's parameter."""
  with served(worker, request.param) as (port, _):
    browser.get(f"http://127.0.0.1:{port}/")
    at = lambda name: browser.find_element("id", name)
    wait(lambda: at("model").text == "tiny")
    yield at
    browser.get("about:blank")  # leaves the server, which waits for those who are there


def wait(condition):
  end = time.monotonic() + 30
  while not condition() and time.monotonic() < end:
    time.sleep(0.02)
  assert condition()


def write(element, text):
  element.clear()
  element.send_keys(text)


@functools.cache
def letter():
  """One after which the likeliest text is long."""
  long = lambda prompt: len(direct(prompt, 20, Rules(temperature=0.0))[0]) == 20
  return next(filter(long, string.ascii_lowercase))


def ask(at, size):
  """Fills in the wish for so many tokens behind `letter`."""
  for name, value in (("max_tokens", str(size)), ("temperature", "0"), ("text", letter())):
    write(at(name), value)


def versions(at, read):
  """What `read` gives from the click on `go` until there is nothing more to come."""
  at("go").click()
  seen = [read()]
  while at("stop").is_enabled():
    if read() != seen[-1]:
      seen.append(read())
  return [*seen, read()]


@pytest.mark.parametrize("page", [""], indirect=True)
def test_text_streams_in_behind_what_was_typed(page):
  assert not page("chat").is_displayed()
  ask(page, 12)
  seen = versions(page, lambda: page("text").get_attribute("value"))
  assert all(text.startswith(letter()) for text in seen)
  assert all(later.startswith(text) for text, later in itertools.pairwise(seen))
  assert len(set(seen)) > 4
  assert len(seen[-1]) == 13
  assert page("go").is_enabled()


@pytest.mark.parametrize("page", [""], indirect=True)
def test_a_wish_that_is_not_granted_is_shown_and_the_next_one_is(page):
  ask(page, 3)
  for name, value, told in (
    ("max_tokens", "999", "ask for at most"),
    ("top_p", "2", "top_p=2 must be above 0, at most 1"),
  ):
    before = page(name).get_attribute("value")
    write(page(name), value)
    page("go").click()
    wait(lambda told=told: told in page("status").text)
    assert "error" in page("status").get_attribute("class")
    write(page(name), before)
  versions(page, lambda: "")
  assert "error" not in page("status").get_attribute("class")
  assert len(page("text").get_attribute("value")) == 4


@pytest.mark.parametrize("page", [""], indirect=True)
def test_stop_ends_a_text(page, worker):
  ask(page, 20)
  page("go").click()
  wait(lambda: len(page("text").get_attribute("value")) > 1)
  page("stop").click()
  wait(lambda: page("go").is_enabled() and not worker.num_accepted)
  assert len(page("text").get_attribute("value")) < 21


@pytest.mark.parametrize("page", [TEMPLATE], indirect=True)
def test_a_model_with_a_template_chats(page):
  assert page("chat").is_displayed()
  assert not page("text").is_displayed()
  write(page("max_tokens"), "2")
  write(page("temperature"), "0")
  for number in (1, 2):
    page("said").send_keys("<b>\n")
    wait(lambda: page("go").is_enabled() and not page("said").get_attribute("value"))
    lines = page("talk").find_elements("tag name", "p")
    assert [line.text.split("\n")[0] for line in lines] == ["user", "assistant"] * number
    assert lines[-2].text == "user\n<b>"
  page("clear").click()
  assert not page("talk").find_elements("tag name", "p")


@pytest.mark.parametrize("page", [TEMPLATE], indirect=True)
def test_what_could_not_be_sent_may_be_said_again(page):
  write(page("max_tokens"), "4")
  page("said").send_keys("x" * 99)
  page("go").click()
  wait(lambda: "ask for at most" in page("status").text)
  assert page("said").get_attribute("value") == "x" * 99
  assert not page("talk").find_elements("tag name", "p")
