from ucpstore.geometry import ArraySpec, Grid, Partition, RankClass, Split, merge
from ucpstore.options import MIB, Options
from ucpstore.plan import ReadCost, plan_save, read_cost, summarize

ROWS = Partition((4,), (0, 1, 2, 3), (Split(0),))
COLUMNS = Partition((4,), (0, 1, 2, 3), (Split(1),))


def test_one_chunk_per_block_reads_four_times_what_is_needed() -> None:
    blocks = Grid((2048, 2048), (512, 2048), (512, 2048), sharded=True)
    assert read_cost(blocks, 4, COLUMNS) == ReadCost(16 * MIB, 64 * MIB, 16, 16)
    squares = Grid((2048, 2048), (512, 512), (512, 2048), sharded=True)
    assert read_cost(squares, 4, COLUMNS) == ReadCost(16 * MIB, 16 * MIB, 16, 16)
    assert read_cost(squares, 4, ROWS) == ReadCost(16 * MIB, 16 * MIB, 16, 4)


def test_summary_of_rows_loaded_as_columns() -> None:
    spec = ArraySpec("w", (4096, 4096), "float32", ("x", "y"), ROWS)
    plan = plan_save(merge([RankClass(ROWS.ranks, (spec,))]), 4, Options())
    summary = summarize(plan, {"w": COLUMNS})
    assert summary.objects == 4
    assert summary.real_bytes == summary.reads.needed_bytes == 64 * MIB
    assert summary.stored_bytes == 64 * MIB + 4 * (16 * 4 + 16 * 16 + 4)
    assert summary.most_written_bytes == summary.stored_bytes // 4
    assert summary.exchanged_bytes == 0
    assert summary.reads.ratio == 1.0


def test_nothing_to_read() -> None:
    assert ReadCost().ratio == 1.0
