{{/* Parts that all pods share: no container runs as root, and only mounted folders can be written. */}}
{{- define "trunkline.podSecurity" -}}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "trunkline.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{- define "trunkline.placement" -}}
terminationGracePeriodSeconds: {{ .grace }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .part.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .part.spreadOver }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "trunkline.selector" (dict "root" $.root "component" $.component) | nindent 8 }}
{{- end }}
{{- end -}}

{{/* MODEL, as the commands take it. */}}
{{- define "trunkline.model" -}}
{{- if eq .Values.model.source "demo" -}}
demo
{{- else if eq .Values.model.source "claim" -}}
{{- list "/model" .Values.model.claim.path | compact | join "/" -}}
{{- else -}}
/model
{{- end -}}
{{- end -}}

{{/* Clients see this name; a folder called /model would say nothing. */}}
{{- define "trunkline.servedName" -}}
{{- if .Values.model.servedName -}}
{{- .Values.model.servedName -}}
{{- else if eq .Values.model.source "claim" -}}
{{- .Values.model.claim.path | default .Values.model.claim.name | base -}}
{{- else if eq .Values.model.source "hostPath" -}}
{{- base .Values.model.hostPath -}}
{{- else if eq .Values.model.source "hub" -}}
{{- .Values.model.hub.repository -}}
{{- end -}}
{{- end -}}

{{/* {root, role}. Of the seed only this container knows, and it leaves no other role's secrets behind. */}}
{{- define "trunkline.initContainers" -}}
{{- $role := .role -}}
{{- with .root -}}
- name: wire-keys
  image: {{ include "trunkline.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [python, -m, trunkline.runtime.wire_keys, --part, {{ $role }}, /secrets/wire/seed, /run/trunkline/wire/wire.keys]
  {{- include "trunkline.containerSecurity" . | nindent 2 }}
  resources:
    requests: {cpu: 50m, memory: 128Mi}
    limits: {memory: 512Mi}
  volumeMounts:
    - {name: wire-seed, mountPath: /secrets/wire, readOnly: true}
    - {name: wire-keys, mountPath: /run/trunkline/wire}
    - {name: scratch, mountPath: /tmp, subPath: tmp}
{{- range (ternary .Values._contexts (list .) (eq $role "router")) }}
{{- if eq .Values.model.source "hub" }}
- name: {{ ternary (include "trunkline.modelVolume" .) "model" (eq $role "router") }}
  image: {{ include "trunkline.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [hf, download]
  args:
    - {{ .Values.model.hub.repository | quote }}
    - --revision
    - {{ .Values.model.hub.revision | quote }}
    - --local-dir
    - /model
    # A router needs the tokenizer, but no weights.
    {{- range concat (ternary (list) (list "*.safetensors") (eq $role "router")) (list "*.json" "tokenizer.model" "*.jinja" "merges.txt" "vocab.txt") }}
    - --include
    - {{ . | quote }}
    {{- end }}
  env:
    - {name: HF_HOME, value: /tmp/hf}
    {{- with .Values.model.hub.tokenSecret }}
    {{- if .name }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
    {{- end }}
    {{- end }}
  {{- include "trunkline.containerSecurity" . | nindent 2 }}
  resources:
    requests: {cpu: 100m, memory: 512Mi}
    limits: {memory: 2Gi}
  volumeMounts:
    - {name: {{ ternary (include "trunkline.modelVolume" .) "model" (eq $role "router") }}, mountPath: /model}
    - {name: scratch, mountPath: /tmp, subPath: tmp}
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* The volume of a model: in a router's pod there is one for each model. */}}
{{- define "trunkline.modelVolume" -}}
{{- ternary (printf "model-%s" (get . "Part")) "model" (hasKey . "Part") -}}
{{- end -}}

{{/* Further models, for routers: NAME=MODEL,… */}}
{{- define "trunkline.moreModels" -}}
{{- $found := list -}}
{{- range rest .Values._contexts -}}
{{- $at := ternary "demo" (include "trunkline.model" . | replace "/model" (printf "/models/%s" .Part)) (eq .Values.model.source "demo") -}}
{{- $found = append $found (printf "%s=%s" (include "trunkline.servedName" .) $at) -}}
{{- end -}}
{{- join "," $found -}}
{{- end -}}

{{- define "trunkline.mounts" -}}
- {name: scratch, mountPath: /tmp, subPath: tmp}
- {name: scratch, mountPath: /var/lib/trunkline, subPath: home}
- {name: wire-keys, mountPath: /run/trunkline/wire, readOnly: true}
{{- if ne .Values.model.source "demo" }}
- {name: model, mountPath: /model, readOnly: true}
{{- end }}
{{- end -}}

{{/* {root, role}. */}}
{{- define "trunkline.volumes" -}}
{{- $role := .role -}}
{{- with .root -}}
- name: scratch
  emptyDir: {sizeLimit: 8Gi}
- name: wire-seed
  secret:
    secretName: {{ include "trunkline.wireSecret" . }}
    defaultMode: 0440
    items:
      - {key: seed, path: seed}
- name: wire-keys
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- range (ternary .Values._contexts (list .) (eq $role "router")) }}
{{- $volume := ternary (include "trunkline.modelVolume" .) "model" (eq $role "router") }}
{{- $size := ternary "1Gi" (printf "%dGi" (int .Values.model.hub.sizeGiB)) (eq $role "router") }}
{{- if eq .Values.model.source "claim" }}
- name: {{ $volume }}
  persistentVolumeClaim: {claimName: {{ .Values.model.claim.name }}, readOnly: true}
{{- else if eq .Values.model.source "hostPath" }}
- name: {{ $volume }}
  hostPath: {path: {{ .Values.model.hostPath }}, type: Directory}
{{- else if eq .Values.model.source "hub" }}
- name: {{ $volume }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        resources:
          requests: {storage: {{ $size }}}
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "trunkline.env" -}}
- {name: HOME, value: /var/lib/trunkline}
- {name: XDG_CACHE_HOME, value: /var/lib/trunkline/.cache}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end -}}

{{/* Options as arguments, without those that are empty: a list of pairs. Helm reads all numbers as fractions. */}}
{{- define "trunkline.options" -}}
{{- range . }}
{{- $value := index . 1 }}
{{- if not (or (kindIs "invalid" $value) (eq (toString $value) "")) }}
- --{{ index . 0 }}
{{- if and (kindIs "float64" $value) (eq (floor $value) $value) }}
- {{ printf "%d" (int64 $value) | quote }}
{{- else }}
- {{ toString $value | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
