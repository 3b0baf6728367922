"""An endpoint for Prometheus with the latest row of metrics of a run."""

import re
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric

from maxlite.metrics.catalogue import describe_metric
from maxlite.metrics.step_row import Row
from maxlite.metrics.waits import Report


class PrometheusWriter:
  """Serves the latest value of every metric as a gauge `maxlite_NAME{run="..."}` at /metrics."""

  def __init__(self, host: str, port: int, run_name: str, report: Report) -> None:
    """Start to serve, in a thread; a run without an endpoint goes on, after a line to `report`."""
    self._run_name = run_name
    self._latest: Row = {}
    self._server = None
    registry = CollectorRegistry()
    registry.register(self)
    try:
      self._server, _ = start_http_server(port, host, registry)
    except OSError as error:
      report(
        f"metrics_port={port} metrics_host={host}: {error.strerror or error}; this run has no "
        "endpoint for Prometheus: write another one at the next start"
      )

  def collect(self) -> Iterator[Metric]:
    """The latest values; called for every request, in a thread of the server."""
    for name, value in self._latest.items():
      doc = name
      metric = describe_metric(name)
      if metric is not None:
        doc = f"{metric.doc} [{metric.unit}]"
      own_name = re.sub(r"[^a-zA-Z0-9_]", "_", name)
      family = GaugeMetricFamily(f"maxlite_{own_name}", doc, labels=["run"])
      family.add_metric([self._run_name], value)
      yield family

  def write(self, row: Row) -> None:
    self._latest = self._latest | row  # rows without an evaluation keep the values of the last

  def flush(self) -> None:
    """Do nothing: the endpoint is not a file."""

  def close(self) -> None:
    if self._server is not None:
      self._server.shutdown()
      self._server.server_close()
