{{- define "varlen.name" -}}
{{- .Values.fullnameOverride | default (eq .Release.Name .Chart.Name | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name)) | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "varlen.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "varlen.labels" -}}
{{ include "varlen.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "varlen.image" -}}
{{ .Values.image.repository }}
{{- if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* Longest drain, then the server's own time to end, then the start of the command and its last look. */ -}}
{{- define "varlen.graceSeconds" -}}
{{ add .Values.drain.timeoutSeconds .Values.server.exitTimeoutSeconds 10 }}
{{- end }}

{{- /* The address, below the model's, and the body of the tiny request to a model: the list of both. */ -}}
{{- define "varlen.probeRequest" -}}
{{- if eq .request "generate" -}}
{{ list "generate" (dict "text_input" "a" "max_tokens" 1 "probe" true) | toJson }}
{{- else -}}
{{- $inputs := list (dict "name" "text" "datatype" "BYTES" "shape" (list 1 1) "data" (list "a")) }}
{{- if eq .request "pairs" }}
{{- $inputs = append $inputs (dict "name" "text_pair" "datatype" "BYTES" "shape" (list 1 1) "data" (list "a")) }}
{{- end }}
{{- list "infer" (dict "inputs" $inputs "parameters" (dict "probe" true)) | toJson }}
{{- end }}
{{- end }}

{{- /* Handler and times of a probe: root is the context, times its values. */ -}}
{{- define "varlen.probe" -}}
{{- $probed := .root.Values.models.probed }}
{{- if eq .root.Values.probe.kind "http" }}
{{- if ne (len $probed) 1 }}
{{- fail "probe.kind http asks one model: leave one in models.probed, or use exec" }}
{{- end }}
httpGet:
  path: /v2/models/{{ (first $probed).name }}/ready
  port: http
{{- else }}
exec:
  command:
    - curl
    - --fail-early
    {{- range $number, $model := $probed }}
    {{- $request := include "varlen.probeRequest" $model | fromJsonArray }}
    {{- if $number }}
    - --next
    {{- end }}
    - --fail
    - --silent
    - --show-error
    - --output
    - /dev/null
    - --noproxy
    - "*"
    - --max-time
    - {{ $.times.timeoutSeconds | quote }}
    - --data
    - {{ index $request 1 | toJson | squote }}
    - http://127.0.0.1:8000/v2/models/{{ $model.name }}/{{ first $request }}
    {{- end }}
{{- end }}
periodSeconds: {{ .times.periodSeconds }}
# Each model may take its time, and the command a second to start.
timeoutSeconds: {{ add (mul .times.timeoutSeconds (len $probed)) 1 }}
failureThreshold: {{ .times.failureThreshold }}
{{- end }}
