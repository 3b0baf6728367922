"""Ten steps of training equal the recorded ones; base_10_steps.json states when they may change."""

import json

import numpy as np
import pytest
from ten_steps import FILE, NOTE, ten_losses

pytestmark = pytest.mark.smoke


def test_ten_steps_give_the_recorded_losses():
  golden = json.loads(FILE.read_text())
  assert golden["note"] == NOTE
  np.testing.assert_allclose(ten_losses(), golden["total_loss"], rtol=1e-5)
