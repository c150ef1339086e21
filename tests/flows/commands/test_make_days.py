from flows.cli import main
from heterps_core.data.reading.days import partitions_of


def test_days_are_written_and_what_they_can_reach_is_told(tmp_path, capsys):
    status = main(
        f"make-days {tmp_path} --first-day 2026-11-30 --num-days 2 --rows-per-day 500 --seed 3".split()
    )

    assert status == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "day"
    assert first.split()[:2] == ["2026-11-30", "500"]
    assert 0.7 < float(second.split()[2]) < 0.9
    assert [str(day) for day in partitions_of(tmp_path)] == ["2026-11-30", "2026-12-01"]


def test_a_wrong_day_is_told_in_one_line(tmp_path, capsys):
    assert main(f"make-days {tmp_path} --first-day 30.11.2026".split()) == 2

    assert "a day must be a date such as 2026-11-21, got '30.11.2026'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
