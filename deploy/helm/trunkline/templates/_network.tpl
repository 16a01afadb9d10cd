{{- define "trunkline.dnsEgress" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end -}}

{{/* The ports at which the ranks of a group export KV. */}}
{{- define "trunkline.exportPorts" -}}
{port: {{ add (int .Values.network.groupPort) 1000 }}, endPort: {{ add (int .Values.network.groupPort) 1063 }}}
{{- end -}}

{{/* The hub, for downloads, and what the operator adds: {root, hub}. */}}
{{- define "trunkline.furtherEgress" -}}
{{- if .hub }}
- ports:
    - {port: 443}
{{- end }}
{{- with .root.Values.networkPolicy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end -}}
