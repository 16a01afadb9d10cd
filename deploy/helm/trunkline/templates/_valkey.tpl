{{/* A Valkey server of the chart's own: {root, component, part: its values, secret, password, arguments, claim}. claim is the values of
     the volume that it writes to; without it, it keeps everything in memory. */}}
{{- define "trunkline.valkeyServer" -}}
{{- $name := printf "%s-%s" (include "trunkline.fullname" .root) .component -}}
{{- $v := .part -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "trunkline.labels" . | nindent 4 }}
spec:
  replicas: 1
  serviceName: {{ $name }}
  selector:
    matchLabels:
      {{- include "trunkline.selector" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "trunkline.selector" . | nindent 8 }}
      {{- if not $v.existingSecret }}
      annotations:
        checksum/secrets: {{ .password | sha256sum }}
      {{- end }}
    spec:
      automountServiceAccountToken: false
      {{- include "trunkline.podSecurity" .root | nindent 6 }}
      {{- include "trunkline.placement" (set . "grace" 30) | nindent 6 }}
      containers:
        - name: valkey
          image: {{ $v.image }}
          # The configuration comes over standard input: on the command line others would see the password.
          command:
            - /bin/sh
            - -c
            - printf 'requirepass %s\n' "$PASSWORD" | exec valkey-server - "$@"
            - sh
          args:
            - --port
            - "6379"
            - --maxmemory
            - {{ $v.maxMemoryMiB }}mb
            - --save
            - ""
            {{- .arguments | nindent 12 }}
          env:
            - name: PASSWORD
              valueFrom:
                secretKeyRef: {name: {{ .secret }}, key: password}
          ports:
            - {name: redis, containerPort: 6379}
          livenessProbe:
            tcpSocket: {port: redis}
            periodSeconds: 10
            failureThreshold: 3
          readinessProbe:
            exec:
              command: [/bin/sh, -c, 'REDISCLI_AUTH="$PASSWORD" valkey-cli ping | grep -q PONG']
            periodSeconds: 10
            timeoutSeconds: 5
          {{- include "trunkline.containerSecurity" .root | nindent 10 }}
          resources:
            {{- toYaml $v.resources | nindent 12 }}
          volumeMounts:
            - {name: data, mountPath: /data}
      {{- if not .claim }}
      volumes:
        - name: data
          emptyDir: {sizeLimit: 64Mi}
      {{- end }}
  {{- with .claim }}
  volumeClaimTemplates:
    - metadata:
        name: data
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .storageClass }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests: {storage: {{ .sizeGiB }}Gi}
  {{- end }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "trunkline.labels" . | nindent 4 }}
spec:
  selector:
    {{- include "trunkline.selector" . | nindent 4 }}
  ports:
    - {name: redis, port: 6379, targetPort: redis}
{{- end -}}

{{- define "trunkline.recordsSecret" -}}
{{- .Values.records.valkey.existingSecret | default (printf "%s-records" (include "trunkline.fullname" .)) -}}
{{- end -}}

{{- define "trunkline.recordsPassword" -}}
{{- include "trunkline.once" (dict "root" . "secret" (include "trunkline.recordsSecret" .) "key" "password" "prefix" "") -}}
{{- end -}}

{{/* --records of the routers; on the command line others would see the password. */}}
{{- define "trunkline.recordsEnv" -}}
{{- if eq .Values.records.mode "valkey" -}}
- name: RECORDS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ include "trunkline.recordsSecret" . }}, key: password}
- name: TRUNKLINE_RECORDS
  value: "redis://:$(RECORDS_PASSWORD)@{{ include "trunkline.fullname" . }}-records:6379/0"
{{- else if eq .Values.records.mode "external" -}}
- name: TRUNKLINE_RECORDS
  valueFrom:
    secretKeyRef: {name: {{ .Values.records.external.secret }}, key: url}
{{- else -}}
- {name: TRUNKLINE_RECORDS, value: "sqlite:/records/records.sqlite"}
{{- end -}}
{{- end -}}

{{/* SIZE of --records-max-bytes; "": its own default. A quarter of Valkey's memory is for what it needs besides. */}}
{{- define "trunkline.recordsMax" -}}
{{- with .Values.records -}}
{{- if not (kindIs "invalid" .maxMiB) -}}
{{- ternary "0" (printf "%dMiB" (int .maxMiB)) (eq (int .maxMiB) 0) -}}
{{- else if eq .mode "valkey" -}}
{{- printf "%dMiB" (div (mul (int .valkey.maxMemoryMiB) 3) 4) -}}
{{- end -}}
{{- end -}}
{{- end -}}
