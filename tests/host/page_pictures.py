"""Take pictures of the matrix page in chromium at three widths: page_pictures.py FOLDER-OF-THE-PAGE FOLDER-OF-THE-PICTURES.

Each shows what a reader sees who typed `--cuda 12.6 --te 2.6` and chose the first combination.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from browser import Browser

WIDTHS = (390, 820, 1440)


def main(page: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        try:
            for width in WIDTHS:
                browser.size(width)
                browser.open((page / "index.html").absolute().as_uri() + "?cuda=12.6&te=2.6#cell=12.6/2.8/2.6")
                browser.js("new Promise(done => setTimeout(done, 500))")
                browser.picture(out / f"page-{width}.png")
            browser.open((page / "index.html").absolute().as_uri())
            browser.click("#ask")
            browser.type("--cuda 12.6 --te 2.6")
            browser.wait_for("#answer .copy")
            browser.picture(out / "page-asked.png")
        finally:
            browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
