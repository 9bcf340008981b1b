import re
from pathlib import Path

import pytest

from lightning_ptdp.schedule.__main__ import main

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "schedules.md").read_text()
COMMAND = "python -m lightning_ptdp.schedule "


@pytest.mark.parametrize(
    ("command", "printed"), re.findall(rf"```text\n\$ {COMMAND}(.*)\n((?:.*\n)*?)```", PAGE), ids=lambda text: text[:40]
)
def test_the_page_shows_what_the_command_prints(command, printed, capsys):
    main(command.split())
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(("command", "path"), re.findall(rf"^{COMMAND}(.*) > docs/(.*)$", PAGE, re.MULTILINE))
def test_the_images_are_what_the_command_draws(command, path, capsys):
    main(command.split())
    assert capsys.readouterr().out == (DOCS / path).read_text()


def test_what_cannot_be_generated_is_a_usage_error(capsys):
    with pytest.raises(SystemExit):
        main(["1f1b", "-p", "2", "-m", "4", "-v", "2"])
    assert "use schedule='interleaved', or virtual_pipeline_size=1" in capsys.readouterr().err
