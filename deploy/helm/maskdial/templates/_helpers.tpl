{{- define "maskdial.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "maskdial.fullname" -}}
{{- $name := include "maskdial.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "maskdial.selectorLabels" -}}
app.kubernetes.io/name: {{ include "maskdial.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "maskdial.labels" -}}
{{ include "maskdial.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "maskdial.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else if .Values.image.tag }}
{{- printf "%s:%s" .Values.image.repository .Values.image.tag }}
{{- else }}
{{- printf "%s:%s%s" .Values.image.repository .Chart.AppVersion (ternary "-cuda" "" .Values.gpu.enabled) }}
{{- end }}
{{- end }}

{{- define "maskdial.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "maskdial.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* Whether there are bundles at /models; empty if not. */}}
{{- define "maskdial.hasBundles" -}}
{{- if and .Values.bundles.volume .Values.bundles.init }}
{{- fail "bundles.volume and bundles.init: set one of them" }}
{{- end }}
{{- if or .Values.bundles.volume .Values.bundles.init }}true{{ end }}
{{- end }}

{{/* The Secret with the keys; empty if there are none. */}}
{{- define "maskdial.secretName" -}}
{{- $own := or .Values.keys.clients .Values.keys.admin .Values.keys.metrics }}
{{- if and .Values.keys.existingSecret $own }}
{{- fail "keys: either existingSecret or clients, admin and metrics" }}
{{- end }}
{{- if $own }}{{ include "maskdial.fullname" . }}{{ else }}{{ .Values.keys.existingSecret }}{{ end }}
{{- end }}

{{/* Whether requests need a key; empty if not. */}}
{{- define "maskdial.hasClients" -}}
{{- if or .Values.keys.clients .Values.keys.existingSecret }}true{{ end }}
{{- end }}

{{/*
The server's settings: config, and what follows from other values. Not by toToml, which writes every number
as a float; JSON's scalars are TOML's.
*/}}
{{- define "maskdial.config" -}}
{{- $derived := dict "host" "0.0.0.0" "port" 8000 }}
{{- if and (include "maskdial.hasBundles" .) (not .Values.config.model) }}
{{- $_ := set $derived "model_dir" "/models" }}
{{- end }}
{{- if .Values.gpu.enabled }}
{{- $_ := set $derived "provider" "cuda" }}
{{- end }}
{{- if include "maskdial.hasClients" . }}
{{- $_ := set $derived "api_key_file" "/etc/maskdial/keys/api-keys" }}
{{- end }}
{{- range $name, $value := merge (deepCopy (omit .Values.config "model")) $derived }}
{{ $name }} = {{ toJson $value }}
{{- end }}
{{- with .Values.config.model }}

[model]
{{- range $name, $path := . }}
{{ toJson $name }} = {{ toJson $path }}
{{- end }}
{{- end }}
{{- end }}

{{/* Up at once, down slowly: what a replica has in its prefix cache is lost with it. */}}
{{- define "maskdial.scaling" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies:
    - {type: Percent, value: 100, periodSeconds: 30}
scaleDown:
  stabilizationWindowSeconds: {{ .Values.autoscaling.scaleDownSeconds }}
  policies:
    - {type: Pods, value: 1, periodSeconds: 120}
{{- end }}
