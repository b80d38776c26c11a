"""Which codec each parameter has: chosen by the plan, changed between two steps."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.vocabulary.codec_spec import AUTO, EXACT, CodecSpec
from ...core.vocabulary.spec import Plan
from ..codecs.eligibility import carrier_of, choose_codec, why_useless
from ..codecs.registry import CodecInstance, make_codec
from ..gradients.parameters import ParameterTable
from ..routes.route import Route


class ChosenCodecs:
    """The codecs of one reducer's parameters. Raises `PlanError` for a codec that a parameter cannot have."""

    def __init__(self, table: ParameterTable, plan: Plan) -> None:
        self.by_name = {name: choose_codec(name, parameter, plan) for name, parameter in table.named}
        self.why_useless = why_useless(plan, self.by_name)
        """Empty when the plan's codec is of use."""
        self._is_auto = plan.codec == AUTO
        self._instances: dict[str, CodecInstance] = {}
        self._default: CodecInstance | None = None
        """Carries gradients without a codec; None: the backend's all-reduce does."""
        self._make(self.by_name)

    def _make(self, specs: Mapping[str, CodecSpec]) -> None:
        texts = {spec.to_text(): spec for spec in specs.values() if not spec.is_exact}
        self._instances.update((text, make_codec(spec)) for text, spec in texts.items())

    @property
    def needs_messages(self) -> bool:
        """Whether some parameter has a codec, or may get one."""
        return self._is_auto or bool(self._instances)

    @property
    def requested(self) -> list[str]:
        """The codecs that some parameter has, or may get, for error messages."""
        return [AUTO] if self._is_auto else list(self._instances)

    def set_default_codec(self, route: Route, *, always: bool) -> None:
        """Decide what carries gradients without a codec: messages, where `always` or the route says so."""
        self._default = make_codec(EXACT) if always else carrier_of(route.route)

    def update(self, changed: Mapping[str, CodecSpec]) -> None:
        """Let the named parameters have other codecs."""
        self._make(changed)
        self.by_name.update(changed)

    def instance(self, spec: CodecSpec) -> CodecInstance | None:
        """Return the codec of `spec`; None where the backend's all-reduce carries the gradients."""
        return self._default if spec.is_exact else self._instances[spec.to_text()]
