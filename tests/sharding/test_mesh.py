import jax
import pytest

from sharding import MESH_AXES, MeshSpec


@pytest.mark.parametrize(
    ("text", "spec", "shown"),
    [
        ("", MeshSpec(), "1 device"),
        (" ", MeshSpec(), "1 device"),
        ("tensor=2", MeshSpec(tensor=2), "tensor=2"),
        ("tensor=4, data=2", MeshSpec(data=2, tensor=4), "data=2,tensor=4"),
        ("stage=1", MeshSpec(), "1 device"),
    ],
)
def test_parse_and_show(text, spec, shown):
    assert MeshSpec.parse(text) == spec
    assert str(spec) == shown


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tensr=2", "unknown mesh axis 'tensr' in 'tensr=2'; allowed: data, stage, expert, context, tensor"),
        ("2", "unknown mesh axis '2'"),
        ("tensor", "size ''; write a whole number"),
        ("tensor=two", "size 'two'; write a whole number"),
        ("tensor=-2", "size '-2'; write a whole number"),
        ("tensor=²", "size '²'; write a whole number"),
        ("tensor=0", "mesh axis tensor has size 0; it must be 1 or more"),
        ("tensor=2,tensor=2", "tensor stands twice"),
        ("tensor=2,", "unknown mesh axis ''"),
    ],
)
def test_bad_text_is_refused_in_words(text, words):
    with pytest.raises(ValueError) as caught:
        MeshSpec.parse(text)
    assert words in str(caught.value)


def test_build_has_all_axes_over_the_first_devices():
    mesh = MeshSpec(data=2, tensor=2).build()
    assert mesh.axis_names == MESH_AXES
    assert dict(mesh.shape) == {"data": 2, "stage": 1, "expert": 1, "context": 1, "tensor": 2}
    assert mesh.devices.ravel().tolist() == jax.devices()[:4]
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_too_few_devices_are_refused_with_the_numbers():
    spec = MeshSpec(tensor=4)
    with pytest.raises(ValueError, match=r"mesh tensor=4 needs 4 devices; there are 2 \(cpu\)"):
        spec.build(jax.devices()[:2])
    with pytest.raises(ValueError, match="needs 4 devices; none were given"):
        spec.build([])
