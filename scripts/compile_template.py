"""Write envbuild/plan/compiled_dockerfile.py: dockerfiles/Dockerfile.j2 as Python, by Jinja's own compiler.

Run after a change of the template: python scripts/compile_template.py. Until then Jinja renders the template itself: the
answer is right and comes later. tests/unit/test_compiled_template.py notices it.
"""

from pathlib import Path

from envbuild.plan.dockerfile import compiled_source

PLACE = Path(__file__).resolve().parent.parent / "envbuild" / "plan" / "compiled_dockerfile.py"

if __name__ == "__main__":
    PLACE.write_text(compiled_source(), encoding="utf-8")
    print(f"wrote {PLACE}")
