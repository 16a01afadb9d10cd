{{- define "trunkline.dnsEgress" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
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
