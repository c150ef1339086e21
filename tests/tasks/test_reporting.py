from tasks.reporting import explanation_markdown
from tasks.scheduling import explain_choice
from tests.tasks.builders import make_problem, make_result


def test_markdown_keeps_the_lines_aligned():
    problem = make_problem()

    text = explanation_markdown(problem, explain_choice.fn(problem, make_result(problem)))

    assert text.startswith("# The plan, explained\n\n```\nWhy this plan")
    assert text.endswith("```\n")
