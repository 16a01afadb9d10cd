{{/* Names. At most 40 characters, so that those of pods, claims and their hashes fit into 63. */}}
{{- define "trunkline.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "trunkline.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "trunkline.labels" -}}
{{ include "trunkline.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | quote }}
{{- end -}}

{{/* Sets .Values._contexts: for each model, the first one first, what its templates see: its own values of `model` and `groups`.
Made once: the secrets that are made in a rendering are the same for all. */}}
{{- define "trunkline.contexts" -}}
{{- if not (hasKey .Values "_contexts") -}}
{{- $root := . -}}
{{- $_ := include "trunkline.checksum" . -}}
{{- $found := list . -}}
{{- range $name, $own := .Values.models -}}
{{- $model := mergeOverwrite (dict "servedName" $name) (deepCopy (default dict $own.model)) -}}
{{- $values := mergeOverwrite (deepCopy $root.Values) (dict "model" $model "groups" (deepCopy (default dict $own.groups))) -}}
{{- $found = append $found (dict "Values" $values "Release" $root.Release "Chart" $root.Chart "Capabilities" $root.Capabilities "Template" $root.Template "Part" $name) -}}
{{- end -}}
{{- $_ := set .Values "_contexts" $found -}}
{{- end -}}
{{- end -}}

{{- define "trunkline.groupName" -}}
{{- printf "%s-group%s" (include "trunkline.fullname" .) (ternary (printf "-%s" (get . "Part")) "" (hasKey . "Part")) -}}
{{- end -}}

{{- define "trunkline.groupComponent" -}}
{{- ternary (printf "group-%s" (get . "Part")) "group" (hasKey . "Part") -}}
{{- end -}}

{{/* The pods of all groups, of every model, as a pod selector. */}}
{{- define "trunkline.anyGroup" -}}
matchLabels:
  {{- if .Values.models }}
  {{- omit (include "trunkline.selector" (dict "root" . "component" "group") | fromYaml) "app.kubernetes.io/component" | toYaml | nindent 2 }}
matchExpressions:
  - {key: trunkline/role, operator: Exists}
  {{- else }}
  {{- include "trunkline.selector" (dict "root" . "component" "group") | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "trunkline.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ default $.Chart.AppVersion .tag }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A value that is made once: as it stands in the cluster, else new. Asked for again in one rendering, it is the same. */}}
{{- define "trunkline.once" -}}
{{- $made := get .root.Values "_made" | default dict -}}
{{- $id := printf "%s/%s" .secret .key -}}
{{- if not (hasKey $made $id) -}}
{{- $live := lookup "v1" "Secret" .root.Release.Namespace .secret -}}
{{- $data := dig "data" dict (default dict $live) -}}
{{- if hasKey $data .key -}}
{{- $_ := set $made $id (get $data .key | b64dec) -}}
{{- else -}}
{{- $_ := set $made $id (printf "%s%s" .prefix (randAlphaNum 43)) -}}
{{- end -}}
{{- $_ := set .root.Values "_made" $made -}}
{{- end -}}
{{- get $made $id -}}
{{- end -}}

{{- define "trunkline.wireSecret" -}}
{{- .Values.wire.existingSecret | default (printf "%s-wire" (include "trunkline.fullname" .)) -}}
{{- end -}}

{{- define "trunkline.wireSeed" -}}
{{- include "trunkline.once" (dict "root" . "secret" (include "trunkline.wireSecret" .) "key" "seed" "prefix" "") -}}
{{- end -}}

{{- define "trunkline.keysSecret" -}}
{{- .Values.auth.existingSecret | default (printf "%s-keys" (include "trunkline.fullname" .)) -}}
{{- end -}}

{{- define "trunkline.clientKey" -}}
{{- include "trunkline.once" (dict "root" .root "secret" (printf "%s-clients" (include "trunkline.fullname" .root)) "key" (printf "%s-key" .role) "prefix" "tl-") -}}
{{- end -}}

{{- define "trunkline.valkeySecret" -}}
{{- .Values.remoteTier.valkey.existingSecret | default (printf "%s-valkey" (include "trunkline.fullname" .)) -}}
{{- end -}}

{{- define "trunkline.valkeyPassword" -}}
{{- include "trunkline.once" (dict "root" . "secret" (include "trunkline.valkeySecret" .) "key" "password" "prefix" "") -}}
{{- end -}}

{{/* Pods start again when a Secret changes that the chart has made and that is read at the start only. */}}
{{- define "trunkline.checksum" -}}
{{- $parts := list -}}
{{- if not .Values.wire.existingSecret -}}
{{- $parts = append $parts (include "trunkline.wireSeed" .) -}}
{{- end -}}
{{- if and (eq .Values.remoteTier.mode "valkey") (not .Values.remoteTier.valkey.existingSecret) -}}
{{- $parts = append $parts (include "trunkline.valkeyPassword" .) -}}
{{- end -}}
{{- join "/" $parts | sha256sum -}}
{{- end -}}

{{/* The Service behind which routers find the groups. A LeaderWorkerSet makes one of its own, for all its pods. */}}
{{- define "trunkline.groupService" -}}
{{- printf "%s-group%s" (include "trunkline.fullname" .) (ternary "" "-leaders" (eq (int .Values.groups.podsPerGroup) 1)) -}}
{{- end -}}

{{/* The largest number of groups that there may be. */}}
{{- define "trunkline.groupsMax" -}}
{{- ternary .Values.groups.autoscaling.maxReplicas .Values.groups.replicas .Values.groups.autoscaling.enabled | int -}}
{{- end -}}

{{/* Names under which clients reach the routers. Without keys a router answers to those that it knows. */}}
{{- define "trunkline.ownNames" -}}
{{- $name := include "trunkline.fullname" . -}}
{{- $space := printf "%s.%s" $name .Release.Namespace -}}
{{- $names := list $name $space (printf "%s.svc" $space) (printf "%s.svc.cluster.local" $space) -}}
{{- if .Values.routers.ingress.enabled -}}
{{- $names = append $names .Values.routers.ingress.host -}}
{{- end -}}
{{- if .Values.routers.httpRoute.enabled -}}
{{- range .Values.routers.httpRoute.hostnames -}}
{{- if not (contains "*" .) -}}
{{- $names = append $names . -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $names | uniq | join "," -}}
{{- end -}}

{{/* Ranks of a group: as given, else one for each GPU, or for each pod. */}}
{{- define "trunkline.tp" -}}
{{- $g := .Values.groups -}}
{{- if $g.tp -}}
{{- int $g.tp -}}
{{- else -}}
{{- mul (max 1 (int $g.gpus)) (int $g.podsPerGroup) -}}
{{- end -}}
{{- end -}}

{{/* What no schema can say of several models together. */}}
{{- define "trunkline.validateModels" -}}
{{- $names := list -}}
{{- range .Values._contexts -}}
{{- include "trunkline.validate" . -}}
{{- $name := include "trunkline.groupName" . -}}
{{- if and $.Values.models (gt (len $name) 52) -}}
{{- fail (printf "%s is too long for the names of pods: a shorter name in models, or fullnameOverride, leaves at most 52 characters" $name) -}}
{{- end -}}
{{- if and $.Values.models .Values.groups.autoscaling.enabled -}}
{{- fail "groups.autoscaling looks at the queues of all models together, so it cannot be used with models; set groups.replicas of each" -}}
{{- end -}}
{{- $served := include "trunkline.servedName" . | default "trunkline-demo" -}}
{{- if has $served $names -}}
{{- fail (printf "two models are served as %s; give one of them another model.servedName" $served) -}}
{{- end -}}
{{- $names = append $names $served -}}
{{- end -}}
{{- end -}}

{{/* What no schema can say. */}}
{{- define "trunkline.validate" -}}
{{- $v := .Values -}}
{{- $g := $v.groups -}}
{{- $tp := include "trunkline.tp" . -}}
{{- if mod (int $tp) (int $g.podsPerGroup) -}}
{{- fail (printf "groups.tp is %d and groups.podsPerGroup %d: every pod has as many ranks as the others, so tp must be a multiple of podsPerGroup" (int $tp) (int $g.podsPerGroup)) -}}
{{- end -}}
{{- $ranks := div (int $tp) (int $g.podsPerGroup) -}}
{{- if and (gt (int $g.gpus) 0) (ne (int $g.gpus) (int $ranks)) -}}
{{- fail (printf "groups.gpus is %d, but each pod has %d ranks (tp / podsPerGroup), and each rank needs a GPU of its own; set groups.gpus to %d, or to 0 for CPUs" (int $g.gpus) (int $ranks) (int $ranks)) -}}
{{- end -}}
{{- if and $g.maxBatch $g.tokenBudget (le (int $g.tokenBudget) (int $g.maxBatch)) -}}
{{- fail (printf "groups.tokenBudget is %d; it must exceed groups.maxBatch (%d), or a full batch would leave no room for new prompts" (int $g.tokenBudget) (int $g.maxBatch)) -}}
{{- end -}}
{{- if and (eq (toString $g.hostTier) "0") (or $g.diskTier.enabled (ne $v.remoteTier.mode "none")) -}}
{{- fail "groups.hostTier is 0, but a disk or remote tier is asked for: KV passes through host memory on its way. Give hostTier a size, or set groups.diskTier.enabled to false and remoteTier.mode to none" -}}
{{- end -}}
{{- if and (eq $v.model.source "claim") (not $v.model.claim.name) -}}
{{- fail "model.source is claim, but model.claim.name is empty; name the PersistentVolumeClaim that holds the checkpoint" -}}
{{- end -}}
{{- if and (eq $v.model.source "hostPath") (not $v.model.hostPath) -}}
{{- fail "model.source is hostPath, but model.hostPath is empty; give the checkpoint's folder on the nodes" -}}
{{- end -}}
{{- if and (eq $v.model.source "hub") (not $v.model.hub.repository) -}}
{{- fail "model.source is hub, but model.hub.repository is empty; give OWNER/NAME" -}}
{{- end -}}
{{- if and (eq $v.remoteTier.mode "external") (not $v.remoteTier.external.secret) -}}
{{- fail "remoteTier.mode is external, but remoteTier.external.secret is empty; name a Secret whose key url holds redis://:PASSWORD@HOST:PORT/DB" -}}
{{- end -}}
{{- if and (eq $v.records.mode "external") (not $v.records.external.secret) -}}
{{- fail "records.mode is external, but records.external.secret is empty; name a Secret whose key url holds redis://:PASSWORD@HOST:PORT/DB" -}}
{{- end -}}
{{- if and (eq $v.records.mode "sqlite") (or $v.routers.autoscaling.enabled (gt (int $v.routers.replicas) 1)) -}}
{{- fail "records.mode is sqlite, a file that only one router can use, but there may be several; set routers.replicas to 1 without routers.autoscaling, or records.mode to valkey or external" -}}
{{- end -}}
{{- if and $v.monitoring.serviceMonitor.enabled $v.auth.enabled $v.auth.existingSecret (not $v.monitoring.serviceMonitor.keySecret.name) -}}
{{- fail "monitoring.serviceMonitor is enabled and auth.existingSecret is yours, so the chart knows no key of role metrics; name the Secret that holds one in monitoring.serviceMonitor.keySecret.name" -}}
{{- end -}}
{{- with $v.routers.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "routers.autoscaling.minReplicas is %d, which is more than maxReplicas (%d)" (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- if and .enabled (eq (int .cpuPercent) 0) (not .requests.enabled) -}}
{{- fail "routers.autoscaling is enabled, but looks at nothing; give cpuPercent a value, or enable requests" -}}
{{- end -}}
{{- if and .enabled (gt (int .cpuPercent) 0) (not (dig "requests" "cpu" "" $v.routers.resources)) -}}
{{- fail "routers.autoscaling.cpuPercent is a share of the requested CPU, but routers.resources.requests.cpu is not set" -}}
{{- end -}}
{{- end -}}
{{- with $g.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "groups.autoscaling.minReplicas is %d, which is more than maxReplicas (%d)" (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- if and $v.routers.ingress.enabled (not $v.routers.ingress.host) -}}
{{- fail "routers.ingress is enabled, but routers.ingress.host is empty; give the name that clients use" -}}
{{- end -}}
{{- if and $v.routers.httpRoute.enabled (not $v.routers.httpRoute.parentRefs) -}}
{{- fail "routers.httpRoute is enabled, but routers.httpRoute.parentRefs is empty; name the Gateway" -}}
{{- end -}}
{{- $ports := list (int $v.network.httpPort) (int $v.network.healthPort) -}}
{{- range until 5 -}}
{{- $ports = append $ports (add (int $v.network.groupPort) . | int) -}}
{{- end -}}
{{- range until 64 -}}
{{- $ports = append $ports (add (int $v.network.groupPort) 1000 . | int) -}}
{{- end -}}
{{- if ne (len $ports) (len (uniq $ports)) -}}
{{- fail (printf "network: httpPort (%d), healthPort (%d), the five ports from groupPort on (%d to %d) and the 64 for KV (%d to %d) must differ" (int $v.network.httpPort) (int $v.network.healthPort) (int $v.network.groupPort) (add (int $v.network.groupPort) 4) (add (int $v.network.groupPort) 1000) (add (int $v.network.groupPort) 1063)) -}}
{{- end -}}
{{- end -}}
