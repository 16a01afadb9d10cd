{{/* The pod of a group, whole or its first, or one of its other pods: {root, role: group | workers}. */}}
{{- define "trunkline.groupPod" -}}
{{- $root := .root -}}
{{- $leads := eq .role "group" -}}
{{- $g := .root.Values.groups -}}
{{- $net := .root.Values.network -}}
{{- $part := dict "root" .root "component" (include "trunkline.groupComponent" .root) "part" $g -}}
{{- $tp := include "trunkline.tp" .root -}}
{{- $ranks := div (int $tp) (int $g.podsPerGroup) -}}
metadata:
  labels:
    {{- include "trunkline.selector" $part | nindent 4 }}
    trunkline/role: {{ .role }}
    {{- with $g.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/secrets: {{ include "trunkline.checksum" .root }}
    {{- with $g.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  {{- include "trunkline.podSecurity" .root | nindent 2 }}
  # The drain, handing over what is left, and what is written to disk after it.
  {{- include "trunkline.placement" (set $part "grace" (add $g.drainSeconds 30)) | nindent 2 }}
  initContainers:
    {{- include "trunkline.initContainers" (dict "root" .root "role" .role) | nindent 4 }}
  containers:
    - name: {{ .role }}
      image: {{ include "trunkline.image" .root }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      {{- if and $leads (gt (int $g.prefill) 0) }}
      # This group's role follows from its number.
      command:
        - /bin/sh
        - -c
        - role=decode; if [ "${HOSTNAME##*-}" -lt {{ int $g.prefill }} ]; then role=prefill; fi; exec trunkline group "$@" --role "$role"
        - sh
      {{- else if $leads }}
      command: [trunkline, group]
      {{- else }}
      # This pod's ranks follow from its place in the group.
      command:
        - /bin/sh
        - -c
        - first=$((LWS_WORKER_INDEX * {{ $ranks }})); exec trunkline workers "$@" --ranks "$first-$((first + {{ sub $ranks 1 }}))"
        - sh
      {{- end }}
      args:
        - {{ include "trunkline.model" .root | quote }}
        - --tp
        - {{ $tp | quote }}
        {{- if $leads }}
        - --listen
        - "0.0.0.0:{{ $net.groupPort }}"
        {{- if gt (int $g.podsPerGroup) 1 }}
        - --ranks
        - "0-{{ sub $ranks 1 }}"
        {{- end }}
        {{- else }}
        - --leader
        - "$(LWS_LEADER_ADDRESS):{{ $net.groupPort }}"
        {{- end }}
        - --health-host
        - "0.0.0.0"
        - --health-port
        - {{ $net.healthPort | quote }}
        - --wire-keys
        - /run/trunkline/wire/wire.keys
        - --device
        - {{ ternary "cuda" "cpu" (gt (int $g.gpus) 0) }}
        - --drain-seconds
        - {{ $g.drainSeconds | quote }}
        - --log-level
        - {{ .root.Values.logLevel }}
        {{- $options := list (list "dtype" $g.dtype) (list "quantization" $g.quantization) (list "kv-memory" $g.kvMemory) (list "host-tier" $g.hostTier) (list "max-context" $g.maxContext) (list "session-ttl" $g.sessionTtlSeconds) (list "otlp-endpoint" .root.Values.tracing.endpoint) }}
        {{- if $leads }}
        {{- if .root.Values.models }}
        {{- $options = append $options (list "served-model-name" (include "trunkline.servedName" .root)) }}
        {{- end }}
        {{- $options = concat $options (list (list "max-batch" $g.maxBatch) (list "token-budget" $g.tokenBudget) (list "max-waiting" $g.maxWaiting)) }}
        {{- end }}
        {{- with include "trunkline.options" $options | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        - --disk-tier
        {{- if $g.diskTier.enabled }}
        - "/kv/tier:{{ max 1 (div (mul (int $g.diskTier.sizeGiB) 9) 10) }}GiB"
        {{- else }}
        - "0"
        {{- end }}
        {{- with $g.extraArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        {{- include "trunkline.env" .root | nindent 8 }}
        # --remote-tier; on the command line others would see the password.
        {{- if eq .root.Values.remoteTier.mode "valkey" }}
        - name: REMOTE_TIER_PASSWORD
          valueFrom:
            secretKeyRef: {name: {{ include "trunkline.valkeySecret" .root }}, key: password}
        - name: TRUNKLINE_REMOTE_TIER
          value: "redis://:$(REMOTE_TIER_PASSWORD)@{{ include "trunkline.fullname" .root }}-valkey:6379/0"
        {{- else if eq .root.Values.remoteTier.mode "external" }}
        - name: TRUNKLINE_REMOTE_TIER
          valueFrom:
            secretKeyRef: {name: {{ .root.Values.remoteTier.external.secret }}, key: url}
        {{- end }}
        {{- with $g.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- if $leads }}
        - {name: requests, containerPort: {{ $net.groupPort }}}
        - {name: events, containerPort: {{ add $net.groupPort 1 }}}
        - {name: plans, containerPort: {{ add $net.groupPort 2 }}}
        - {name: reports, containerPort: {{ add $net.groupPort 3 }}}
        - {name: rendezvous, containerPort: {{ add $net.groupPort 4 }}}
        {{- end }}
        - {name: health, containerPort: {{ $net.healthPort }}}
      {{- if $leads }}
      # Started: a token was generated. A pod that takes longer hangs, and is started again.
      startupProbe:
        httpGet: {path: /startupz, port: health}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ max 2 (div (add (int $g.startupSeconds) 4) 5) }}
      {{- else }}
      # Their first epoch waits for the other pods: no reason to be killed.
      startupProbe:
        httpGet: {path: /livez, port: health}
        periodSeconds: 2
        failureThreshold: 90
      {{- end }}
      livenessProbe:
        httpGet: {path: /livez, port: health}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      readinessProbe:
        httpGet: {path: /readyz, port: health}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      # No preStop: at SIGTERM a group tells its routers at once that it takes nothing new.
      {{- include "trunkline.containerSecurity" .root | nindent 6 }}
      resources:
        {{- $resources := deepCopy $g.resources }}
        {{- if gt (int $g.gpus) 0 }}
        {{- $resources = merge (dict "limits" (dict $g.gpuResource (int $g.gpus)) "requests" (dict $g.gpuResource (int $g.gpus))) $resources }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        {{- include "trunkline.mounts" .root | nindent 8 }}
        - {name: shm, mountPath: /dev/shm}
        {{- if $g.diskTier.enabled }}
        - {name: kv, mountPath: /kv}
        {{- end }}
  volumes:
    {{- include "trunkline.volumes" (dict "root" .root "role" .role) | nindent 4 }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $g.shmMiB }}Mi}
{{- end -}}

{{- define "trunkline.groupClaims" -}}
{{- with .Values.groups.diskTier -}}
{{- if .enabled -}}
volumeClaimTemplates:
  - metadata:
      name: kv
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .storageClass }}
      storageClassName: {{ . }}
      {{- end }}
      resources:
        requests: {storage: {{ .sizeGiB }}Gi}
persistentVolumeClaimRetentionPolicy:
  whenScaled: {{ .whenScaled }}
  whenDeleted: {{ .whenDeleted }}
{{- end -}}
{{- end -}}
{{- end -}}
