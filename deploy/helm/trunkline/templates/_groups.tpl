{{/* The groups of a model; the context is of the model (`trunkline.contexts`). */}}
{{- define "trunkline.groups" -}}
{{- $name := include "trunkline.groupName" . -}}
{{- $part := dict "root" . "component" (include "trunkline.groupComponent" .) "part" .Values.groups -}}
{{- if eq (int .Values.groups.podsPerGroup) 1 -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}
  namespace: {{ .Release.Namespace }}
  labels:
    {{- include "trunkline.labels" $part | nindent 4 }}
spec:
  {{- if not .Values.groups.autoscaling.enabled }}
  replicas: {{ .Values.groups.replicas }}
  {{- end }}
  serviceName: {{ printf "%s-group" (include "trunkline.fullname" .) }}
  # All start at once; updates go one by one, each only when the one before has generated a token.
  podManagementPolicy: Parallel
  selector:
    matchLabels:
      {{- include "trunkline.selector" $part | nindent 6 }}
  {{- include "trunkline.groupClaims" . | nindent 2 }}
  template:
    {{- include "trunkline.groupPod" (dict "root" . "role" "group") | nindent 4 }}
{{- else -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ $name }}
  namespace: {{ .Release.Namespace }}
  labels:
    {{- include "trunkline.labels" $part | nindent 4 }}
spec:
  {{- if not .Values.groups.autoscaling.enabled }}
  replicas: {{ .Values.groups.replicas }}
  {{- end }}
  # The first pod is ready only when the ranks of the others are there.
  startupPolicy: LeaderCreated
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration: {maxUnavailable: 1, maxSurge: 0}
  networkConfig: {subdomainPolicy: Shared}
  leaderWorkerTemplate:
    size: {{ .Values.groups.podsPerGroup }}
    # Ranks that are lost come back under a new epoch; those that live keep what they have loaded.
    restartPolicy: None
    {{- include "trunkline.groupClaims" . | nindent 4 }}
    leaderTemplate:
      {{- include "trunkline.groupPod" (dict "root" . "role" "group") | nindent 6 }}
    workerTemplate:
      {{- include "trunkline.groupPod" (dict "root" . "role" "workers") | nindent 6 }}
{{- end }}
{{- if .Values.groups.pdb.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name }}
  namespace: {{ .Release.Namespace }}
  labels:
    {{- include "trunkline.labels" $part | nindent 4 }}
spec:
  maxUnavailable: {{ .Values.groups.pdb.maxUnavailable }}
  # A group that serves no requests may be evicted: one that lost a pod, or one that cannot start.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "trunkline.selector" $part | nindent 6 }}
{{- end }}
{{- with .Values.groups.autoscaling }}
{{- if .enabled }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ $name }}
  namespace: {{ $.Release.Namespace }}
  labels:
    {{- include "trunkline.labels" $part | nindent 4 }}
spec:
  {{- if eq (int $.Values.groups.podsPerGroup) 1 }}
  scaleTargetRef: {apiVersion: apps/v1, kind: StatefulSet, name: {{ $name }}}
  {{- else }}
  scaleTargetRef: {apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, name: {{ $name }}}
  {{- end }}
  minReplicas: {{ .minReplicas }}
  maxReplicas: {{ .maxReplicas }}
  metrics:
    # Of all groups together, as routers see them; the target is for one group.
    - type: External
      external:
        metric:
          name: {{ .metric | quote }}
          selector:
            matchLabels: {namespace: {{ $.Release.Namespace }}}
        target: {type: AverageValue, averageValue: {{ .target | quote }}}
  behavior:
    scaleUp:
      # A new group needs time until it takes load off the others.
      policies:
        - {type: Pods, value: 1, periodSeconds: {{ .scaleUpSeconds }}}
    scaleDown:
      stabilizationWindowSeconds: {{ .scaleDownSeconds }}
      policies:
        - {type: Pods, value: 1, periodSeconds: {{ .scaleUpSeconds }}}
{{- end }}
{{- end }}
{{- end -}}
