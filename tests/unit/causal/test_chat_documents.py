"""Documents: the template's own way to show them, or a system message."""

from maskdial.causal.chat.documents import as_text, document_of
from maskdial.causal.chat.template import ChatTemplate

HIDES = "{{ messages[0].content }}"
SHOWS = "{% for d in documents or [] %}<{{ d.title }}|{{ d.text }}>{% endfor %}" + HIDES


def test_a_template_that_has_a_place_for_them() -> None:
    template = ChatTemplate(SHOWS, name="m", tool_source=HIDES)
    try:
        assert template.takes_documents(with_tools=False)
        assert not template.takes_documents(with_tools=True)
        documents = [document_of({"title": "a", "text": "b"})]
        messages = [{"role": "user", "content": "hi"}]
        assert template.render(messages, variables={"documents": documents}) == "<a|b>hi"
        assert template.render(messages) == "hi"
    finally:
        template.close()


def test_what_a_document_may_be() -> None:
    documents = [document_of(each) for each in ("a", {"title": "T", "text": "b"}, {"n": "é"})]
    assert documents == [
        {"text": "a"},
        {"title": "T", "text": "b"},
        {"n": "é", "text": '{"n": "é"}'},
    ]
    assert as_text(documents).endswith('[1]\na\n\n[2] T\nb\n\n[3]\n{"n": "é"}')
