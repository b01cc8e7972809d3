//! Jinja chat templates, rendered as Hugging Face's `apply_chat_template` does.

use super::jinja::{Jinja, raised, stopped};
use super::{Error, Result, TemplateLimits, Unwanted};
use chrono::{Local, NaiveDateTime};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// A message in the form that templates read.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ChatMessage {
    /// The role in the template's spelling. The caller has checked that it is a known one.
    pub role: String,
    /// `None` only for an assistant message with tool calls.
    pub content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<serde_json::Value>,
    /// What the model thought before an earlier answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
}

/// What a prompt is made from beside its messages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptExtras {
    /// Definitions of tools, in OpenAI's form.
    pub tools: Option<Value>,
    /// Variables of the template's own.
    pub variables: Map<String, Value>,
    /// The last message is one that the assistant goes on with: the prompt ends with its text.
    pub continues: bool,
}

/// Fields that clients may add to messages of these roles, and that many templates leave out.
const OPTIONAL_FIELDS: [(&str, &str); 6] = [
    ("system", "name"),
    ("user", "name"),
    ("assistant", "name"),
    ("tool", "name"),
    ("tool", "tool_call_id"),
    ("assistant", "reasoning_content"),
];

/// Members of messages in which templates look for what was thought.
const THOUGHT_MEMBERS: [&str; 2] = ["reasoning_content", "thinking"];

/// Variables that are not a client's to set: others set them, or they are functions.
const RESERVED: [&str; 16] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "raise_exception",
    "strftime_now",
    "namespace",
    "range",
    "dict",
    "loop",
    "caller",
];

/// Longest text of a refusal that is passed on, in characters.
const REFUSAL_LIMIT: usize = 300;

pub struct ChatTemplate {
    jinja: Jinja,
    knows_tool_calls: bool,
    /// Whether the template gets a call's arguments as an object rather than as the client's text.
    wants_objects: bool,
    /// Whether a message with calls gets an empty text where it has none.
    wants_content: bool,
    /// The member of a message in which the template looks for what was thought.
    thought_member: &'static str,
    /// Roles with fields of their messages that change nothing in a prompt.
    left_out: Vec<(&'static str, &'static str)>,
    /// `bos_token` and `eos_token` if the release has them, and the absence of `tools` and
    /// `documents`.
    variables: Map<String, Value>,
}

impl ChatTemplate {
    /// Compiles a template, each rendering of which ends at `limits`. An empty token means that the
    /// release has none.
    ///
    /// # Errors
    /// `BadFile` when the template does not compile or cannot render a single user message.
    pub fn new(
        source: &str,
        bos_token: &str,
        eos_token: &str,
        limits: TemplateLimits,
    ) -> Result<Self> {
        Self::with_clock(source, bos_token, eos_token, limits, || Local::now().naive_local())
    }

    /// Compiles as `new` does; `now` gives the time to templates that write the date.
    pub fn with_clock(
        source: &str,
        bos_token: &str,
        eos_token: &str,
        limits: TemplateLimits,
        now: impl Fn() -> NaiveDateTime + Send + Sync + 'static,
    ) -> Result<Self> {
        let bad = |what: &str, error: minijinja::Error| {
            Error::BadFile(format!(
                "the chat template {what}: {}; use the release's own template",
                stopped(&error).unwrap_or_else(|| error.to_string())
            ))
        };
        let jinja =
            Jinja::compile(source, limits, now).map_err(|error| bad("does not compile", error))?;
        let tokens = [("bos_token", bos_token), ("eos_token", eos_token)];
        let present = tokens.into_iter().filter(|(_, token)| !token.is_empty());
        let mut variables: Map<_, _> =
            present.map(|(name, token)| (name.to_owned(), token.into())).collect();
        // The reference sets both to none, and templates test `tools is not none`.
        variables.extend(["tools", "documents"].map(|name| (name.to_owned(), Value::Null)));
        let knows_tool_calls = source.contains("tool_calls");
        let mut template = Self {
            jinja,
            knows_tool_calls,
            wants_objects: false,
            wants_content: false,
            thought_member: THOUGHT_MEMBERS[0],
            left_out: Vec::new(),
            variables,
        };
        match template.fill_plain(&json!([{ "role": "user", "content": "question" }])) {
            Err(error) if raised(&error).is_none() => {
                return Err(bad("cannot render a single user message", error));
            }
            _ => {}
        }
        template.wants_content = knows_tool_calls && template.fails_without_content();
        template.wants_objects = knows_tool_calls && template.prefers_objects();
        let read = THOUGHT_MEMBERS.into_iter().find(|name| template.writes("assistant", name));
        template.thought_member = read.unwrap_or(THOUGHT_MEMBERS[0]);
        template.left_out = OPTIONAL_FIELDS
            .into_iter()
            .filter(|(role, field)| !template.writes(role, field))
            .collect();
        Ok(template)
    }

    /// Whether a message of this role may have the field without any effect on the prompt.
    pub fn leaves_out(&self, role: &str, field: &str) -> bool {
        self.left_out.contains(&(role, field))
    }

    /// Whether two values of the field, or its absence, make different prompts. A template that
    /// refuses the conversation may refuse it for the field. Many templates write a thought only
    /// where a call follows it.
    fn writes(&self, role: &str, field: &str) -> bool {
        let differ = |probe: &dyn Fn(Option<&str>) -> Value| {
            let prompt = |value: Option<&str>| self.fill_plain(&probe(value)).ok();
            // Some templates demand an id of nine characters.
            let (one, other) = (prompt(Some("probe0001"))?, prompt(Some("probe0002"))?);
            Some(one != other || prompt(None).is_some_and(|without| without != one))
        };
        let in_call = |value: Option<&str>| self.probe_of_call(field, value);
        differ(&|value| self.probe(role, field, value)).unwrap_or(true)
            || (role == "assistant" && differ(&in_call) == Some(true))
    }

    /// A conversation that ends with a call's result. The message with the call has the field.
    fn probe_of_call(&self, field: &str, value: Option<&str>) -> Value {
        let mut probe = self.probe("tool", "tool_call_id", Some("probe0001"));
        probe[1]["content"] = "".into();
        if let Some(value) = value {
            probe[1][field] = value.into();
        }
        probe
    }

    /// A conversation with one message of the role that has the field, if there is a value.
    fn probe(&self, role: &str, field: &str, value: Option<&str>) -> Value {
        let question = json!({ "role": "user", "content": "question" });
        let mut called = json!({ "role": "assistant", "content": "called" });
        if self.knows_tool_calls {
            let function = json!({ "name": "function0", "arguments": {} });
            called["tool_calls"] =
                json!([{ "id": "probe0001", "type": "function", "function": function }]);
        }
        let mut message = json!({ "role": role, "content": "content" });
        if let Some(value) = value {
            message[field] = value.into();
        }
        match role {
            "system" => json!([message, question]),
            "assistant" => json!([question, message, question]),
            "tool" => json!([question, called, message]),
            _ => json!([message]),
        }
    }

    /// Clients send a call's arguments as text; the reference's convention is an object. A template
    /// that writes objects in its own way gets objects; one that fails on them, or prints them as
    /// it prints the text, gets the text unchanged.
    fn prefers_objects(&self) -> bool {
        let content = if self.wants_content { json!("") } else { Value::Null };
        let [of_object, of_text] = self.prompts_of_call(&content);
        of_object.is_some_and(|prompt| prompt.contains("value0") && Some(prompt) != of_text)
    }

    /// Some templates take apart the text of a message with calls, which clients leave out.
    fn fails_without_content(&self) -> bool {
        let fails = |content: &Value| self.prompts_of_call(content).iter().all(Option::is_none);
        fails(&Value::Null) && !fails(&json!(""))
    }

    /// The prompts of a conversation with a call: with its arguments as an object, and as text.
    fn prompts_of_call(&self, content: &Value) -> [Option<String>; 2] {
        let object = json!({ "argument0": "value0" });
        let text = json!(r#"{"argument0": "value0"}"#);
        [object, text].map(|arguments| {
            let function = json!({ "name": "function0", "arguments": arguments });
            let call = json!([{ "id": "call00000", "type": "function", "function": function }]);
            let messages = json!([
                { "role": "user", "content": "question" },
                { "role": "assistant", "content": content, "tool_calls": call },
                { "role": "tool", "tool_call_id": "call00000", "content": "result" },
            ]);
            self.fill_plain(&messages).ok()
        })
    }

    /// A call's arguments in the form that this template takes.
    pub(super) fn call_arguments(&self, arguments: &Value) -> Value {
        if self.wants_objects { arguments.clone() } else { arguments.to_string().into() }
    }

    /// The messages, with their calls in the form that this template takes.
    pub(super) fn adapted(&self, messages: &[ChatMessage]) -> Vec<ChatMessage> {
        let mut messages = messages.to_vec();
        if self.wants_content {
            for message in messages.iter_mut().filter(|message| message.tool_calls.is_some()) {
                message.content.get_or_insert_default();
            }
        }
        if self.wants_objects {
            let calls = messages
                .iter_mut()
                .filter_map(|message| message.tool_calls.as_mut()?.as_array_mut())
                .flatten();
            for arguments in calls.filter_map(|call| call.pointer_mut("/function/arguments")) {
                let object = arguments
                    .as_str()
                    .and_then(|text| serde_json::from_str::<Map<String, Value>>(text).ok());
                *arguments = object.map_or_else(|| arguments.take(), Value::Object);
            }
        }
        messages
    }

    /// Whether a client may set this variable, because the template reads it.
    pub fn reads(&self, variable: &str) -> bool {
        self.jinja.reads(variable) && !RESERVED.contains(&variable)
    }

    /// Renders any conversation. Nothing is adapted or checked.
    pub fn render_raw(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<String> {
        let extras = PromptExtras { tools: tools.cloned(), ..PromptExtras::default() };
        self.render_with(messages, &extras, add_generation_prompt)
    }

    pub(super) fn render_with(
        &self,
        messages: &Value,
        extras: &PromptExtras,
        add_generation_prompt: bool,
    ) -> Result<String> {
        self.fill(messages, extras, add_generation_prompt, &Unwanted::default())
            .map_err(|error| refusal(&error))
    }

    fn fill_plain(&self, messages: &Value) -> Result<String, minijinja::Error> {
        self.fill(messages, &PromptExtras::default(), true, &Unwanted::default())
    }

    fn fill(
        &self,
        messages: &Value,
        extras: &PromptExtras,
        add_generation_prompt: bool,
        unwanted: &Unwanted,
    ) -> Result<String, minijinja::Error> {
        let mut context = self.variables.clone();
        context.extend(extras.variables.clone());
        context.extend(extras.tools.iter().map(|tools| ("tools".to_owned(), tools.clone())));
        context.insert("messages".into(), messages.clone());
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        self.jinja.render(context, unwanted)
    }

    /// Errors: `TemplateRefused` when the template raises an exception, cannot express these
    /// messages, or leaves one out.
    pub fn render(&self, messages: &[ChatMessage], add_generation_prompt: bool) -> Result<String> {
        let extras = PromptExtras::default();
        self.render_until(messages, &extras, add_generation_prompt, &Unwanted::default())
    }

    /// Renders as `render` does, until nobody wants it any more.
    pub(super) fn render_until(
        &self,
        messages: &[ChatMessage],
        extras: &PromptExtras,
        add_generation_prompt: bool,
        unwanted: &Unwanted,
    ) -> Result<String> {
        if !self.knows_tool_calls && messages.iter().any(|message| message.tool_calls.is_some()) {
            return Err(Error::TemplateRefused("it has no place for tool_calls".into()));
        }
        let mut adapted = json!(self.adapted(messages));
        for message in adapted.as_array_mut().into_iter().flatten() {
            let message = message.as_object_mut();
            let moved = message.and_then(|m| Some((m.remove(THOUGHT_MEMBERS[0])?, m)));
            if let Some((thought, message)) = moved {
                message.insert(self.thought_member.into(), thought);
            }
        }
        let prompt = self
            .fill(&adapted, extras, add_generation_prompt, unwanted)
            .map_err(|error| refusal(&error))?;
        match messages.iter().find(|message| is_left_out(message, &prompt)) {
            Some(message) => {
                Err(Error::TemplateRefused(format!("it leaves out a {} message", message.role)))
            }
            None => Ok(prompt),
        }
    }
}

/// Whether the prompt lacks the content of a system or user message. Templates may drop old
/// reasoning from assistant messages, so those are not looked at.
fn is_left_out(message: &ChatMessage, prompt: &str) -> bool {
    let content = message.content.as_deref().unwrap_or_default().trim();
    ["system", "user"].contains(&message.role.as_str()) && !prompt.contains(content)
}

/// The error for a conversation that the template cannot render. It rendered a plain question when
/// the release was loaded, so the cause lies in these messages.
fn refusal(error: &minijinja::Error) -> Error {
    let stopped = stopped(error);
    let reason = stopped.as_deref().or_else(|| raised(error));
    let reason = reason.unwrap_or("it cannot express this combination of roles and fields");
    Error::TemplateRefused(reason.chars().take(REFUSAL_LIMIT).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn conversation(turns: &[(&str, &str)]) -> Vec<ChatMessage> {
        let message = |(role, content): &(&str, &str)| ChatMessage {
            role: (*role).into(),
            content: Some((*content).into()),
            ..ChatMessage::default()
        };
        turns.iter().map(message).collect()
    }

    fn compiled(source: &str) -> Result<ChatTemplate> {
        ChatTemplate::new(source, "<s>", "</s>", TemplateLimits::default())
    }

    fn render(source: &str, turns: &[(&str, &str)]) -> Result<String> {
        compiled(source)?.render(&conversation(turns), true)
    }

    #[test]
    fn fields_without_a_place_are_known() {
        let check = |written: &str, expect: &[(&str, &str)]| {
            let source =
                format!("{{% for m in messages %}}{{{{ m.content }}}}{written}{{% endfor %}}");
            let template = compiled(&source).unwrap();
            let left_out = OPTIONAL_FIELDS
                .into_iter()
                .filter(|(role, field)| template.leaves_out(role, field));
            assert_eq!(left_out.collect::<Vec<_>>(), expect, "{written}");
        };
        check("", &OPTIONAL_FIELDS);
        check("{{ m.name }}", &OPTIONAL_FIELDS[4..]);
        check("{% if m.name %}named{% endif %}", &OPTIONAL_FIELDS[4..]);
        check("{{ m.reasoning_content }}", &OPTIONAL_FIELDS[..5]);
        check("{{ m.tool_call_id }}", &[&OPTIONAL_FIELDS[..4], &OPTIONAL_FIELDS[5..]].concat());
        check(
            "{% if m.role == 'user' and m.name %}{{ m.name }}{% endif %}",
            &[
                ("system", "name"),
                ("assistant", "name"),
                ("tool", "name"),
                ("tool", "tool_call_id"),
                ("assistant", "reasoning_content"),
            ],
        );
        check("{% if m.name %}{{ raise_exception('no names') }}{% endif %}", &OPTIONAL_FIELDS[4..]);
    }

    #[test]
    fn python_and_jinja_habits() {
        let check = |source: &str, expect: &str| {
            assert_eq!(render(source, &[("user", " hi ")]).unwrap(), expect, "{source}");
        };
        let all = "{{ messages[0].content }}";
        check(
            &format!("{{{{ bos_token }}}}{all}{{{{ eos_token }}}}{{{{ pad_token }}}}"),
            "<s> hi </s>",
        );
        check(
            "{% if add_generation_prompt %}{{ messages[0]['content'].strip() }}{% endif %}",
            "hi",
        );
        check(
            "{% if tools is defined and tools is none %}{{ messages[0].content | trim }}{% endif %}",
            "hi",
        );
        check("{%- for m in messages -%}\n  {{ m.content }}\n{%- endfor %}\n", " hi ");
        check("{{ messages | tojson }}", r#"[{"role": "user", "content": " hi "}]"#);
        check("{% generation %}{{ messages[0].content }}{% endgeneration %}", " hi ");
        check("{{ messages[0].content }}{{ messages[0].name is defined }}", " hi False");
        check(
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ m.content }}{% endfor %}{{ ns.n }}",
            " hi 1",
        );
        check("{{ messages[0].content }}{{ strftime_now('%%') }}", " hi %");
        check(
            "{%- generation +%}{{ messages[0].content }}{%+endgeneration-%}\n{% set generation = 1 %}",
            " hi ",
        );
        check("{{ messages[0].content }}{{ tools }}{{ none ~ none }}", " hi NoneNoneNone");
    }

    #[test]
    fn refusals_are_the_clients_to_read() {
        let check = |source: &str, expect: &str| {
            let refused = render(source, &[("system", "a"), ("user", "b")]);
            assert!(
                matches!(&refused, Err(Error::TemplateRefused(reason)) if reason == expect),
                "{source}: {refused:?}"
            );
        };
        check("{{ raise_exception('roles must alternate') }}", "roles must alternate");
        check(
            &format!("{{{{ raise_exception('{}') }}}}", "x".repeat(9999)),
            &"x".repeat(REFUSAL_LIMIT),
        );
        check("{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{{ 'x' ~ m() }}", "deep");
        check(
            "{{ messages[1].content + none if messages[1] else messages[0].content }}",
            "it cannot express this combination of roles and fields",
        );
        check("{{ messages[-1].content }}", "it leaves out a system message");
        check("{{ messages[0].content }}", "it leaves out a user message");
    }

    #[test]
    fn tool_calls_are_never_dropped() {
        let mut messages = conversation(&[("user", "a"), ("assistant", "b")]);
        messages[1].tool_calls = Some(json!([{ "function": { "name": "f" } }]));
        let render = |source: &str| compiled(source).unwrap().render(&messages, false);
        assert!(matches!(render("{{ messages[0].content }}"), Err(Error::TemplateRefused(_))));
        assert_eq!(render("{% for m in messages %}{{ (m.tool_calls or [{}])[0].function.name if m.tool_calls else m.content }}{% endfor %}").unwrap(), "af");
    }

    #[test]
    fn absent_tools_are_absent_to_every_kind_of_question() {
        let check = |question: &str| {
            let source =
                format!("{{{{ messages[0].content }}}}{{% if {question} %}}tools!{{% endif %}}");
            assert_eq!(render(&source, &[("user", "hi")]).unwrap(), "hi", "{question}");
        };
        check("tools");
        check("tools is not none");
        check("tools is defined and tools is not none and tools | length > 0");
        check("tools is iterable and tools | length > 0");
    }

    #[test]
    fn a_template_that_cannot_work_is_a_bad_file() {
        let check = |source: &str, expect: &str| {
            let Err(Error::BadFile(reason)) = compiled(source) else {
                panic!("{source}: accepted")
            };
            assert!(reason.contains(expect), "{reason}");
        };
        check("{% if %}", "does not compile");
        check("{{ messages[0].content + 1 }}", "a single user message");
    }

    /// Templates that cost more than any limit allows, unless the first message is `question`.
    const HOSTILE: [&str; 20] = [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s * 2 %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set s %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = s %}{% endfor %}",
        "{% macro twice(s, n) %}{% if n %}{{ twice(s ~ s, n - 1) }}{% endif %}{{ s }}{% endmacro %}{{ twice('x', 60) }}",
        "{% macro on(n) %}{{ on(n + 1) }}{% endmacro %}{{ on(0) }}",
        "{% for i in range(99999) %}{{ 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx' * 99 }}{% endfor %}",
        "{% for i in range(90000) %}                                                                           yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy         yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy         yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy         yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy{% endfor %}",
        "{% set n = 99999999 %}{{ 'x' * n }}{{ ('x' * n) * n }}",
        "{% set s = 'x' * 1000000 %}{{ s | replace('x', s) }}",
        "{% set s = 'x' * 1000000 %}{{ s.replace('x', s) }}",
        "{{ range(99999) | join('x' * 1000000) }}",
        "{% set s = 'x' * 1000000 %}{{ s.join([s, s, s] * 99) }}",
        "{{ 'a\nb' | indent(999999999) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ [[1]] | tojson(indent=999999999) }}{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | tojson }}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ ns.l }}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(9999) %}{% set ns.l = [ns.l] %}{% endfor %}",
    ];

    #[test]
    fn a_rendering_ends_at_its_limits() {
        for hostile in HOSTILE {
            let source = format!(
                "{{% if messages[0].content != 'question' %}}{hostile}{{% endif %}}{{{{ messages[0].content }}}}"
            );
            let template = compiled(&source).unwrap();
            let refused = template.render(&conversation(&[("user", "go")]), true);
            assert!(matches!(refused, Err(Error::TemplateRefused(_))), "{hostile}: {refused:?}");
            let plain = template.render(&conversation(&[("user", "question")]), true);
            assert_eq!(plain.unwrap(), "question", "the template works on");
            assert!(compiled(hostile).is_err(), "{hostile}: qualifies");
        }
    }

    #[test]
    fn a_limit_is_named() {
        let limits = TemplateLimits { steps: 100, written_bytes: 100 };
        let check = |source: &str, expect: &str| {
            let Err(Error::BadFile(why)) = ChatTemplate::new(source, "", "", limits) else {
                panic!("{source}: accepted")
            };
            assert!(why.contains(expect), "{why}");
        };
        check("{% for i in range(99) %}{% endfor %}", "template.max_steps");
        check("{{ 'x' * 99 }}{{ messages[0].content }}", "template.max_written_mib");
    }

    #[test]
    fn calls_without_a_text_get_an_empty_one_where_templates_need_it() {
        let source = "{% for m in messages %}{{ m.role }}{{ m.content.split('x')[-1] }}\
            {% for call in m.tool_calls or [] %}{{ call.function.arguments }}{% endfor %}{% endfor %}";
        let mut messages = conversation(&[("user", "hi"), ("assistant", "")]);
        messages[1].content = None;
        messages[1].tool_calls = Some(json!([{ "function": { "name": "f", "arguments": "{}" } }]));
        let template = compiled(source).unwrap();
        assert_eq!(template.adapted(&messages)[1].content.as_deref(), Some(""));
        assert!(template.render(&messages, true).is_ok());
        let template = compiled(&source.replace(".split('x')[-1]", "")).unwrap();
        assert_eq!(template.adapted(&messages)[1].content, None);
    }

    #[test]
    fn an_unwanted_rendering_ends() {
        let template = compiled("{{ messages[0].content }}").unwrap();
        let (unwanted, messages) = (Unwanted::default(), conversation(&[("user", "hi")]));
        let plain = PromptExtras::default();
        assert!(template.render_until(&messages, &plain, true, &unwanted).is_ok());
        unwanted.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(template.render_until(&messages, &plain, true, &unwanted).is_err());
    }

    #[test]
    fn values_grow_as_jinja_makes_them() {
        let check = |expression: &str, expect: &str| {
            let source = format!("{{{{ messages[0].content }}}}{{{{ {expression} }}}}");
            assert_eq!(render(&source, &[("user", "")]).unwrap(), expect, "{expression}");
        };
        check("1 + 2", "3");
        check("1.5 + 2", "3.5");
        check("2 * 3", "6");
        check("'a' * 3 ~ 1 ~ none", "aaa1None");
        check("'a' + 'b'", "ab");
        check("[1] + [2, 'x']", "[1, 2, 'x']");
        check("[1, 2] * 2", "[1, 2, 1, 2]");
        check("{'b': 1, 'a': [2]}", "{'b': 1, 'a': [2]}");
        check("{'b': 1}.b", "1");
        check("['a', 'b'] | join('-')", "a-b");
        check("'-'.join(['a', 'b'])", "a-b");
        check("'a-b'.replace('-', '+') | upper | indent(2)", "A+B");
        check("'%s has %d' | format('a', 2)", "a has 2");
        check("[3, 1] | list | reverse | first", "1");
    }

    proptest! {
        #[test]
        fn contents_are_data_not_template(content in any::<String>()) {
            prop_assert_eq!(render("[{{ messages[0].content }}]", &[("user", &content)]).unwrap(), format!("[{content}]"));
        }
    }
}
