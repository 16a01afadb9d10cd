"""Several models in one installation: groups of each, and routers that know all."""

from __future__ import annotations

import pytest
from kubernetes.checks import admits, check_all, sends
from kubernetes.rendering import Object, containers, helm_python, of_kind, only, option, pod_templates, render

VALUES: Object = {
    "auth": {"existingSecret": "k"},
    "model": {"source": "claim", "claim": {"name": "models", "path": "large"}},
    "groups": {"gpus": 2, "replicas": 3},
    "models": {
        "small": {"model": {"claim": {"path": "small"}}, "groups": {"gpus": 1, "replicas": 1}},
        "tiny": {"model": {"source": "hub", "servedName": "org/tiny", "hub": {"repository": "org/tiny"}}},
        "wide": {
            "model": {"source": "hostPath", "hostPath": "/models/wide"},
            "groups": {"podsPerGroup": 2, "gpus": 4, "replicas": 2, "diskTier": {"enabled": False}},
        },
    },
}
OUTSIDE = frozenset({"k", "models"})


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return render(VALUES)


def test_an_installation_is_sound(objects: list[Object]) -> None:
    check_all(objects, OUTSIDE)
    names = [found["metadata"]["name"] for found in of_kind(objects, "StatefulSet", "LeaderWorkerSet")]
    assert sorted(names) == [
        "tl-trunkline-group",
        "tl-trunkline-group-small",
        "tl-trunkline-group-tiny",
        "tl-trunkline-group-wide",
        "tl-trunkline-records",
    ]


def test_each_model_has_groups_of_its_own(objects: list[Object]) -> None:
    found = {}
    for owner in of_kind(objects, "StatefulSet", "LeaderWorkerSet"):
        if "-group" in owner["metadata"]["name"]:
            (_, template), *_ = pod_templates([owner])
            leader = template["spec"]["containers"][0]
            model = next(v for v in template["spec"]["volumes"] if v["name"] == "model")
            where = option(leader, "served-model-name"), leader["args"][0], option(leader, "tp")
            source = sorted(set(model) - {"name"})
            found[owner["metadata"]["name"][13:]] = (*where, owner["spec"]["replicas"], *source)
    assert found == {
        "group": ("large", "/model/large", "2", 3, "persistentVolumeClaim"),
        "group-small": ("small", "/model/small", "1", 1, "persistentVolumeClaim"),
        "group-tiny": ("org/tiny", "/model", "2", 3, "ephemeral"),
        "group-wide": ("wide", "/model", "8", 2, "hostPath"),
    }


def test_routers_have_the_tokenizer_of_each(objects: list[Object]) -> None:
    template = only(objects, "Deployment")["spec"]["template"]
    router = template["spec"]["containers"][0]
    assert (router["args"][0], option(router, "served-model-name")) == ("/model/large", "large")
    assert option(router, "more-models") == "small=/models/small/small,org/tiny=/models/tiny,wide=/models/wide"
    mounts = {mount["mountPath"]: mount["name"] for mount in router["volumeMounts"]}
    assert [mounts[path] for path in ("/model", "/models/small", "/models/tiny", "/models/wide")] == [
        "model",
        "model-small",
        "model-tiny",
        "model-wide",
    ]
    (download,) = [each for each in containers(template) if each["name"] == "model-tiny"]
    assert "*.safetensors" not in download["args"]
    assert {"name": "model-tiny", "mountPath": "/model"} in download["volumeMounts"]


def test_no_pod_belongs_to_two_models_and_routers_find_all(objects: list[Object]) -> None:
    labels = {}
    for owner, template in pod_templates(of_kind(objects, "StatefulSet", "LeaderWorkerSet")):
        role = template["metadata"]["labels"].get("trunkline/role")
        if role:
            labels[owner["metadata"]["name"], role] = template["metadata"]["labels"]
    for kind in ("StatefulSet", "PodDisruptionBudget"):
        for owner in of_kind(objects, kind):
            wanted = owner["spec"]["selector"]["matchLabels"]
            if "group" in wanted["app.kubernetes.io/component"]:
                held = {name for (name, _), own in labels.items() if wanted.items() <= own.items()}
                assert held == {owner["metadata"]["name"]}
    service = only(objects, "Service", "-group")["spec"]["selector"]
    leaders = {key for key, own in labels.items() if service.items() <= own.items()}
    assert leaders == {key for key in labels if key[1] == "group"}
    assert len(leaders) == 4
    router = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    for own in labels.values():
        assert sends(objects, router, own, 7400)
        assert admits(objects, router, own, 7400)
        assert not admits(objects, {"role": "frontend"}, own, 7400)
    assert admits(objects, {"role": "frontend"}, router, 8000), "what is said of groups is not said of routers"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"models": {"Small": {}}}, "Small"),
        ({"models": {"small": {"grups": {}}}}, "grups"),
        ({"models": {"small": {"groups": {"replicas": 0}}}}, "replicas"),
        ({"models": {"small": {"model": {"source": "claim"}}}}, "model.claim.name is empty"),
        ({"models": {"small": {"groups": {"tp": 3, "podsPerGroup": 2}}}}, "groups.tp is 3"),
        (
            {"models": {"a": {"model": {"servedName": "trunkline-demo"}}}},
            "two models are served as",
        ),
        ({"models": {"a": {}}, "groups": {"autoscaling": {"enabled": True}}}, "cannot be used with models"),
        ({"fullnameOverride": "f" * 40, "models": {"a-long-name": {}}}, "is too long for the names of pods"),
    ],
)
def test_what_cannot_be_is_refused(values: Object, says: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        render(values)
    assert says in str(refused.value)
