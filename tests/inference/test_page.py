"""The web page in a browser: streaming text, chat and error messages."""

import itertools
import shutil
import string
import time

import pytest
import tiny_engine as tiny

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
if not (CHROMIUM and DRIVER):
  pytest.skip("needs a browser: apt-get install chromium chromium-driver", allow_module_level=True)
webdriver = pytest.importorskip("selenium.webdriver", reason="needs the package selenium")

from tiny_server import TEMPLATE, direct, served  # noqa: E402

from maxlite.inference.batcher import Batcher  # noqa: E402
from maxlite.inference.sampling import SamplingParams  # noqa: E402
from maxlite.inference.server.engine_thread import EngineThread  # noqa: E402

FLAGS = (
  "--headless",
  "--no-sandbox",  # required to start as root
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
def engine_thread(two_rows):
  """A slow engine, so that the browser shows intermediate text."""
  with pytest.MonkeyPatch.context() as patch:
    tiny.slow_down(patch, two_rows, lambda: time.sleep(0.1))
    with EngineThread(Batcher(two_rows), queue_size=3).running() as engine_thread:
      yield engine_thread


@pytest.fixture
def page(browser, engine_thread, request):
  """at(id): an element of the page; the test's parameter is the model's chat template."""
  with served(engine_thread, request.param) as (port, _):
    browser.get(f"http://127.0.0.1:{port}/")

    def at(name):
      return browser.find_element("id", name)

    wait(lambda: at("model").text == "tiny")
    yield at
    browser.get("about:blank")  # disconnects: the server waits for open connections


def wait(condition):
  end = time.monotonic() + 30
  while not condition() and time.monotonic() < end:
    time.sleep(0.02)
  assert condition()


def write(element, text):
  element.clear()
  element.send_keys(text)


@pytest.fixture(scope="module")
def letter(two_rows):
  """A prompt with a long greedy completion."""
  for prompt in string.ascii_lowercase:
    completion, _ = direct(two_rows, prompt, 20, SamplingParams(temperature=0.0))
    if len(completion) == 20:
      return prompt
  raise AssertionError("all completions are short")


def fill_in(at, prompt, size):
  """Fill in a prompt and a number of tokens."""
  write(at("max_tokens"), str(size))
  write(at("temperature"), "0")
  write(at("text"), prompt)


def versions(at, read):
  """Successive values of `read` from the click on `generate` until generation has ended."""
  at("generate").click()
  seen = [read()]
  while at("stop").is_enabled():
    if read() != seen[-1]:
      seen.append(read())
  return [*seen, read()]


@pytest.mark.parametrize("page", [""], indirect=True)
def test_text_streams_in_after_the_prompt(page, letter):
  assert not page("chat").is_displayed()
  fill_in(page, letter, 12)
  seen = versions(page, lambda: page("text").get_attribute("value"))
  assert all(text.startswith(letter) for text in seen)
  assert all(later.startswith(text) for text, later in itertools.pairwise(seen))
  assert len(set(seen)) > 4
  assert len(seen[-1]) == 13
  assert page("generate").is_enabled()


@pytest.mark.parametrize("page", [""], indirect=True)
def test_an_error_is_shown_and_the_next_request_succeeds(page, letter):
  fill_in(page, letter, 3)
  for name, value, message in (
    ("max_tokens", "999", "request at most"),
    ("top_p", "2", "top_p=2 must be above 0, at most 1"),
  ):
    before = page(name).get_attribute("value")
    write(page(name), value)
    page("generate").click()
    wait(lambda message=message: message in page("status").text)
    assert "error" in page("status").get_attribute("class")
    write(page(name), before)
  versions(page, lambda: "")
  assert "error" not in page("status").get_attribute("class")
  assert len(page("text").get_attribute("value")) == 4


@pytest.mark.parametrize("page", [""], indirect=True)
def test_stop_ends_generation(page, engine_thread, letter):
  fill_in(page, letter, 20)
  page("generate").click()
  wait(lambda: len(page("text").get_attribute("value")) > 1)
  page("stop").click()
  wait(lambda: page("generate").is_enabled() and not engine_thread.num_active)
  assert len(page("text").get_attribute("value")) < 21


@pytest.mark.parametrize("page", [TEMPLATE], indirect=True)
def test_a_model_with_a_template_chats(page):
  assert page("chat").is_displayed()
  assert not page("text").is_displayed()
  write(page("max_tokens"), "2")
  write(page("temperature"), "0")
  for number in (1, 2):
    page("message").send_keys("<b>\n")
    wait(lambda: page("generate").is_enabled() and not page("message").get_attribute("value"))
    lines = page("conversation").find_elements("tag name", "p")
    assert [line.text.split("\n")[0] for line in lines] == ["user", "assistant"] * number
    assert lines[-2].text == "user\n<b>"
  page("clear").click()
  assert not page("conversation").find_elements("tag name", "p")


@pytest.mark.parametrize("page", [TEMPLATE], indirect=True)
def test_a_message_that_failed_stays_in_the_input(page):
  write(page("max_tokens"), "4")
  page("message").send_keys("x" * 99)
  page("generate").click()
  wait(lambda: "request at most" in page("status").text)
  assert page("message").get_attribute("value") == "x" * 99
  assert not page("conversation").find_elements("tag name", "p")
