"""The months of the weather example, which each rank reads for its own cells."""

import numpy as np

from tests.examples.loading import example
from tests.worlds import on_ranks


@on_ranks(3)
def test_each_rank_reads_the_months_of_its_cells(rank):
    climate, split = example("weather", "climate"), example("weather", "split")
    data = climate.load(1)
    graph = climate.vc.graph.partition(data, method=split.together(data, 3, 1))
    months, (x, change) = climate.Months(graph), climate.known()
    own = graph["grid"].owned_ids.numpy()
    assert sum(rows.bytes_read for rows in months.rows) == 12 * 7 * 2 * len(own)
    for month, (found, truth) in zip([11, 3], months.samples([11, 3]), strict=True):
        np.testing.assert_allclose(found.numpy(), x[month, own], rtol=0, atol=2e-5)
        expected = change[month, own] / change[climate.TRAIN].std()
        np.testing.assert_allclose(truth.numpy()[:, 0], expected, rtol=0, atol=2e-5)
