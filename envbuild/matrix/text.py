"""Specs and rules as short text, for tables and sentences."""

from envbuild.matrix.model import Rule, Spec


def spec_text(spec: Spec) -> str:
    """Return a spec as text: `>=2.1`, or `2.1 or 2.3` where it has alternatives."""
    return spec if isinstance(spec, str) else " or ".join(spec)


def rule_text(rule: Rule) -> tuple[str, str]:
    """Return when a rule applies, and what it then demands; the second is empty where it demands nothing."""
    spoken = [f"{axis} {spec_text(spec)}" for axis, spec in rule.when.items()]
    if rule.kind == "note":
        return ", ".join([*spoken, *(f"no {axis}" for axis in rule.without)]), ""
    when = ", ".join(spoken)
    then = [f"{axis} {spec_text(spec)}" for axis, spec in rule.needs.items()]
    then += [" and ".join(f"{axis} {spec_text(spec)}" for axis, spec in each.items()) for each in rule.any_of]
    then += [f"{axis} in use" for axis in rule.with_]
    then += [f"no {axis}" for axis in rule.without]
    if rule.same:
        then.append(f"one major.minor of {' and '.join(rule.same)}")
    named = f"{rule.component}: {when}" if rule.component else when
    return named, (" or " if rule.any_of else " and ").join(then)
