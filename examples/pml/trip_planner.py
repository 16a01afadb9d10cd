"""A schema in PML with parameters and unions within modules (`trip.pml`), and prompts of it.

The city is one of a union, what to do there one of a union within the city. Arguments are computed with the
request, at their parameters' places; a prompt without them has the schema's defaults.
"""

from __future__ import annotations

from pathlib import Path

from talk import connect, show

FOLDER = Path(__file__).parent

PROMPTS = {
    "Lisbon, food": (FOLDER / "lisbon.pml").read_text(encoding="utf-8"),
    "the same again": (FOLDER / "lisbon.pml").read_text(encoding="utf-8"),
    "Lisbon, museums, somebody else": """
        <prompt schema="trip">
          <traveller name="Henry" days="five"/>
          <lisbon/>
          <user>What is the room of Saffron Point?</user>
        </prompt>""",
    "Oslo, food, cheap": """
        <prompt schema="trip">
          <traveller name="Nora"/>
          <oslo><oslo-food/></oslo>
          <budget/>
          <user>What is the price of Glacier Tower?</user>
        </prompt>""",
}


def main() -> None:
    """Store the schema, then ask."""
    with connect(__doc__) as client:
        stored = client.schemas.create((FOLDER / "trip.pml").read_text(encoding="utf-8"))
        print(f"{stored.name}: {len(stored.modules)} modules, {stored.extent} positions\n")
        for title, prompt in PROMPTS.items():
            show(title, client.chat(prompt, max_tokens=40, temperature=0))


if __name__ == "__main__":
    main()
